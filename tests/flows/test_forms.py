"""The run form in Prefect's own page, in a real browser: what a person sees, may write, and what the run then gets."""

from __future__ import annotations

import re
import shutil
from collections.abc import Iterator
from typing import Any

import pytest

from flows.config import RUN_CONFIGS
from flows.deployments import Plan, deploy, load_flow, standard_targets
from flows.form import FIRST
from tests.support.prefect_server import PrefectServer, prefect_server
from tests.support.waiting import wait_until

sync_api = pytest.importorskip("playwright.sync_api", reason="playwright is not installed")
CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
pytestmark = [
    pytest.mark.skipif(CHROMIUM is None, reason="no Chromium on this machine: the form is not looked at"),
    pytest.mark.timeout(600),
]
ARGUMENTS = ["--headless=new", "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run"]
ARGUMENTS += ["--disable-background-networking", "--disable-component-update", "--disable-sync"]
PATIENCE_MS = 120_000.0


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[PrefectServer]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("LOOPWRIGHT_HOME", str(tmp_path_factory.mktemp("home")))
        with prefect_server() as running:
            deploy(Plan(standard_targets(["grpo", "distillation", "sft", "reap"])))
            yield running


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    with sync_api.sync_playwright() as playwright:
        chromium = playwright.chromium.launch(executable_path=CHROMIUM, headless=False, args=ARGUMENTS)
        yield chromium
        chromium.close()


class Form:
    """The form of a deployment, open in a tab."""

    def __init__(self, browser: Any, server: PrefectServer, name: str) -> None:
        self.server = server
        with server.api() as api:
            self.id = api.get(f"/deployments/name/{name}").raise_for_status().json()["id"]
        self.page = browser.new_page(viewport={"width": 1400, "height": 16_000})
        self.page.set_default_timeout(PATIENCE_MS)
        self.page.goto(f"{server.pages}/deployments/deployment/{self.id}/run")
        self.field("config.model").wait_for()

    def field(self, path: str) -> Any:
        """The field of a dotted name, with its label, help and inputs."""
        found = self.page.locator("body")
        for name in path.split("."):
            label = self.page.locator("xpath=./div/label//span[contains(@class,'schema-form-property__label')]")
            label = label.filter(has_text=re.compile(rf"^{name}( \(Optional\))?$"))
            found = found.locator(".schema-form-property").filter(has=label).first
        return found

    def submit(self) -> None:
        self.page.get_by_role("button", name="Submit").click()

    def runs(self) -> list[dict[str, Any]]:
        with self.server.api() as api:
            return api.post("/flow_runs/filter", json={"deployments": {"id": {"any_": [self.id]}}}).json()


@pytest.mark.parametrize("kind", ["grpo", "distillation", "sft"])
def test_every_field_is_there_by_its_name_with_its_help_the_most_used_first(
    browser: Any, server: PrefectServer, kind: str
) -> None:
    form = Form(browser, server, f"{load_flow(kind).name}/local")
    schema = RUN_CONFIGS[kind].model_json_schema()

    def shown() -> str:
        return " ".join(form.field("config").inner_text().split())

    # The page draws fields one after the other, and those in sight first.
    names = list(schema["properties"])
    wait_until(lambda: all(re.search(rf"\b{name}\b", shown()) for name in names), 120, f"all of {names} are drawn")
    text = shown()
    for name, field in schema["properties"].items():
        # Marks of code are drawn, not written; what stands in angle brackets outside of them would vanish.
        help_text = " ".join(field["description"].replace("`", "").split())
        if "__" not in help_text:
            assert help_text in text, (name, help_text)
    order = [text.find(f" {name} ") for name in ("model", "dataset", "max_steps", "learning_rate", "storage", "retry")]
    assert order == sorted(order) and -1 not in order
    assert FIRST[:3] == ("name", "model", "dataset")
    # Groups are open, choices are lists of them, and an optional group opens.
    assert form.field("config.trainer.ranks").locator("input").input_value() == "1"
    choices = form.field("config.dtype").locator("option").all_text_contents()
    assert [text.strip() for text in choices if text.strip()] == ["auto", "float32", "bfloat16", "float16"]
    form.field("config.peft").get_by_text("PeftConfig", exact=True).click()
    assert form.field("config.peft.r").locator("input").input_value() == "16"
    form.page.close()


def test_a_preset_fills_the_form_a_bad_value_is_refused_at_its_field_and_the_run_gets_what_is_written(
    browser: Any, server: PrefectServer
) -> None:
    form = Form(browser, server, "train-grpo/grpo-cpu-tiny")
    assert form.field("config.model").locator("textarea, input").first.input_value() == "smollm2-135m-instruct"
    generations = form.field("config.num_generations")
    assert generations.locator("input").input_value() == "4"

    generations.locator("input").fill("-5")
    form.submit()
    form.field("config.dataset.path").get_by_text("'path' is a required property").wait_for()
    generations.get_by_text("-5 is less than the minimum of 2").wait_for()
    assert form.runs() == []

    generations.locator("input").fill("6")
    form.field("config.dataset.path").locator("textarea, input").first.fill("rows.jsonl")
    form.field("config.name").get_by_text("str", exact=True).click()
    form.field("config.name").locator("textarea, input").last.fill("from-the-form")
    form.submit()
    form.page.wait_for_url(re.compile(r"(flow-run|runs/|tab=Runs)"))
    (run,) = form.runs()
    config = RUN_CONFIGS["grpo"].model_validate(run["parameters"]["config"])
    assert (config.name, config.num_generations, config.dataset.path) == ("from-the-form", 6, "rows.jsonl")  # type: ignore[union-attr]
    untouched = RUN_CONFIGS["grpo"].model_validate(
        {**_preset_fields(), "dataset": {"path": "rows.jsonl"}, "name": "from-the-form", "num_generations": 6}
    )
    assert config.model_dump() == untouched.model_dump()
    form.page.close()


def _preset_fields() -> dict[str, Any]:
    from flows.presets import PRESETS

    return dict(PRESETS["grpo-cpu-tiny"].fields)


@pytest.mark.parametrize(
    ("wrong", "named"),
    [
        ({"num_generations": -5}, "config.num_generations"),
        ({"weight_sync": "bogus"}, "config.weight_sync"),
        ({"servers": {"student": {"count": 0}}}, "config.servers.student.count"),
        ({"nonsense": 1}, "nonsense"),
    ],
)
def test_the_api_refuses_what_the_form_refuses_and_names_the_field(
    server: PrefectServer, wrong: dict[str, Any], named: str
) -> None:
    with server.api() as api:
        local = api.get("/deployments/name/train-grpo/local").json()["id"]
        config = {"model": "m", "dataset": {"path": "x"}, **wrong}
        answer = api.post(f"/deployments/{local}/create_flow_run", json={"parameters": {"config": config}})
    assert answer.status_code == 409 and named in answer.json()["detail"], answer.text

"""`loopwright evaluate`. Imports what the command needs only when it runs, as `flows.cli` does."""

from __future__ import annotations

from pathlib import Path

import click


@click.command()
@click.argument("arguments", nargs=-1, metavar="[FILE] [FIELD=VALUE]...")
def evaluate(arguments: tuple[str, ...]) -> None:
    """Measure a run's checkpoint, an adapter or a model on a held-out set.

    `loopwright evaluate run=gsm8k step=200`, or with a set of its own: `run=gsm8k dataset.path=test.jsonl
    reward_func=rewards.py:accuracy`; a model: `model=FOLDER dataset.path=… reward_func=…`. Fields may stand in FILE (YAML or
    JSON).
    """
    from flows import prefect_api
    from flows.evaluate_file import load_evaluation
    from flows.evaluate_subject import subject
    from flows.failures import RunFailed, describe
    from infra.registry import Registry
    from trainers.errors import LoopwrightError

    file = next((Path(text) for text in arguments[:1] if "=" not in text), None)
    config = load_evaluation(file, arguments[1:] if file else arguments)
    subject(config, Registry())  # again in the flow; here it saves the user the wait for Prefect
    with prefect_api.api():
        from flows.evaluate_flow import evaluate as run_evaluation

        try:
            result = run_evaluation(config)
        except LoopwrightError:
            raise
        except Exception as error:
            raise RunFailed("user", f"the evaluation failed: {describe(error)}") from error
    click.echo("\n".join(f"{name}: {value}" for name, value in result.items()))

"""Every `transformers.TrainingArguments` field that Loopwright refuses, with the reason and the alternative."""

REFUSED: dict[str, str] = {}

"""YAML as configs are written in it: YAML 1.2's scalars, as OmegaConf reads them, and no key twice."""

from __future__ import annotations

import re
from typing import Any

import yaml


class _Loader(yaml.SafeLoader):
    """YAML 1.2's scalars, as OmegaConf reads them: `1e-4` is a number, `on` and dates are text; no key twice."""

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Any, Any]:
        seen: set[Any] = set()
        for key_node, _ in node.value:
            key = self.construct_object(key_node, deep=True)
            if key in seen:
                raise yaml.constructor.ConstructorError(None, None, f"key `{key}` is written twice", key_node.start_mark)
            seen.add(key)
        return super().construct_mapping(node, deep)


def _set_resolvers() -> None:
    dropped = {"tag:yaml.org,2002:bool", "tag:yaml.org,2002:float", "tag:yaml.org,2002:int", "tag:yaml.org,2002:timestamp"}
    _Loader.yaml_implicit_resolvers = {
        first: [(tag, pattern) for tag, pattern in entries if tag not in dropped]
        for first, entries in yaml.SafeLoader.yaml_implicit_resolvers.items()
    }
    number = r"[-+]?(?:[0-9][0-9_]*\.[0-9_]*(?:[eE][-+]?[0-9]+)?|[0-9][0-9_]*[eE][-+]?[0-9]+|\.[0-9]+(?:[eE][-+]?[0-9]+)?)"
    for tag, pattern, first in (
        ("bool", r"(?:true|True|TRUE|false|False|FALSE)", "tTfF"),
        ("int", r"[-+]?[0-9]+", "-+0123456789"),
        ("float", rf"(?:{number}|[-+]?\.(?:inf|Inf|INF)|\.(?:nan|NaN|NAN))", "-+0123456789."),
    ):
        _Loader.add_implicit_resolver(f"tag:yaml.org,2002:{tag}", re.compile(rf"^{pattern}$"), list(first))


_set_resolvers()


def parse_yaml(text: str) -> Any:
    """`text` as YAML, with the reading of scalars described at `_Loader`."""
    return yaml.load(text, Loader=_Loader)

from __future__ import annotations

import ast
import json
import shlex

import pytest

from backhaul.snippets import announcement, curl, python


@pytest.mark.parametrize("model", ["SmolLM2-135M-Instruct", 'it\'s "odd"', "模型"])
def test_snippets_can_be_pasted(model: str) -> None:
    words = shlex.split(curl("http://127.0.0.1:8000/v1", model))
    assert words[:2] == ["curl", "http://127.0.0.1:8000/v1/chat/completions"]
    assert json.loads(words[words.index("-d") + 1])["model"] == model
    source = python("http://127.0.0.1:8000/v1", model)
    strings = {node.value for node in ast.walk(ast.parse(source)) if isinstance(node, ast.Constant)}
    assert {model, "http://127.0.0.1:8000/v1"} <= strings


def test_the_announcement_has_both() -> None:
    text = announcement("http://h:1/v1", "m", "http://h:2")
    assert "http://h:2/ " in text
    assert "curl http://h:1/v1/chat/completions" in text
    assert "client = OpenAI(base_url='http://h:1/v1'" in text

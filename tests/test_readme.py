"""The README's examples run as they stand."""

import re
from pathlib import Path

import pytest

README = Path(__file__).parent.parent / "README.md"
EXAMPLES = re.findall(r"## ([^\n]+)\n+```python\n(.*?)```", README.read_text(), flags=re.DOTALL)


def test_there_is_an_example_of_each_op():
    titles = [title for title, _ in EXAMPLES]
    assert titles == ["Kimi Delta Attention in ten lines", "Grouped weight gradient in ten lines"]


@pytest.mark.parametrize("code", [code for _, code in EXAMPLES], ids=[title for title, _ in EXAMPLES])
def test_example_runs(code):
    exec(compile(code, "README.md", "exec"), {})


def test_links_lead_somewhere():
    links = re.findall(r"\]\(([^)#]+)\)", README.read_text())
    assert links and [link for link in links if not (README.parent / link).exists()] == []

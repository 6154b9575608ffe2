"""The READMEs' examples run as they stand, and what they link to exists."""

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
TEXTS = sorted(ROOT.glob("*.md"), reverse=True)
TEXTS += [path for folder in ("torch_ext", "tests") for path in sorted((ROOT / folder).rglob("*.md"))]
LINK = re.compile(r"\]\(([^)#]+)(?:#[^)]*)?\)")
EXAMPLES = {
    f"{path.relative_to(ROOT)}: {title}": code
    for path in TEXTS
    for title, code in re.findall(r"## ([^\n]+)\n+```python\n(.*?)```", path.read_text(), flags=re.DOTALL)
}


def test_there_is_an_example_of_each_op():
    assert list(EXAMPLES) == [
        "README.md: Kimi Delta Attention in ten lines",
        "README.md: Grouped weight gradient in ten lines",
        "torch_ext/culax/grouped_wgrad/README.md: Block-scaled operands (stages/gemm_scaled)",
    ]


@pytest.mark.parametrize("code", EXAMPLES.values(), ids=EXAMPLES)
def test_example_runs(code):
    exec(compile(code, "README.md", "exec"), {})


@pytest.mark.parametrize("path", TEXTS, ids=lambda path: str(path.relative_to(ROOT)))
def test_links_lead_somewhere(path):
    links = LINK.findall(path.read_text())
    assert [link for link in links if not (path.parent / link).exists()] == []


def test_the_readme_has_links():
    assert LINK.search((ROOT / "README.md").read_text())

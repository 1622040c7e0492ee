"""The code of the documentation runs as it stands there, and prints what the pages show."""

from __future__ import annotations

import importlib.util
import re
from pathlib import Path

import pytest
from matplotlib import pyplot as plt

from tests.support.pages import blocks_of, run_page

DOCS = Path(__file__).parent.parent / "docs"
PAGES = [page for page in sorted(DOCS.rglob("*.md")) if "auto_tutorials" not in page.parts and blocks_of(page)]
#: Packages that pages import, and that not every environment has.
OPTIONAL = ["attn_gym", "flexmask_attention_gym", "flexmask_transformers", "transformers"]


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.relative_to(DOCS).with_suffix("").as_posix())
def test_page_runs(page: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    imported = set(re.findall(r"^(?:import|from) (\w+)", page.read_text(), re.MULTILINE))
    for package in imported.intersection(OPTIONAL):
        if importlib.util.find_spec(package) is None:
            pytest.skip(f"{package} is not installed")
    monkeypatch.chdir(tmp_path)
    run_page(page)
    plt.close("all")


def write(folder: Path, text: str) -> Path:
    page = folder / "page.md"
    page.write_text(text)
    return page


class TestPages:
    """What runs the pages notices where one is wrong."""

    def test_names_carry_over(self, tmp_path: Path) -> None:
        text = "```python\na = 2\n```\ntext\n```python\nprint(a, 7)\n```\n\n```text\n2 ...\n```\n```yaml\nx: 1\n```\n"
        page = write(tmp_path, text)
        assert run_page(page)["a"] == 2
        assert [(block.line, block.output) for block in blocks_of(page)] == [(1, None), (5, "2 ...\n")]

    @pytest.mark.parametrize("output", ["", "```text\n3\n```\n", "and\n```text\n2\n```\n"])
    def test_other_output(self, tmp_path: Path, output: str) -> None:
        with pytest.raises(AssertionError, match="line 1 prints"):
            run_page(write(tmp_path, f"```python\nprint(2)\n```\n{output}"))

    def test_output_that_is_not_there(self, tmp_path: Path) -> None:
        with pytest.raises(AssertionError, match="line 1 prints"):
            run_page(write(tmp_path, "```python\na = 1\n```\n```text\n1\n```\n"))

    def test_commands(self, tmp_path: Path) -> None:
        page = "```bash\npip install x\nflexmask diff causal full --q-len 2 # exit code 1\n```\n"
        run_page(write(tmp_path, page))
        with pytest.raises(AssertionError, match="line 1 prints"):
            run_page(write(tmp_path, page + "```text\nequal\n```\n"))
        with pytest.raises(AssertionError, match="not a named mask"):
            run_page(write(tmp_path, "```bash\nflexmask stats casual\n```\n"))

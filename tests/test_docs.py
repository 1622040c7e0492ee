"""The code of the documentation runs as it stands there, and prints what the pages show."""

from __future__ import annotations

import importlib.util
import re
from importlib import import_module
from pathlib import Path

import pytest
from matplotlib import pyplot as plt

import flexmask as fm
from flexmask import registry
from flexmask._suggestions import PACKAGES
from tests.support.examples import OWN_MASKS
from tests.support.pages import blocks_of, run_page
from tests.support.ranks import fork_ranks

DOCS = Path(__file__).parent.parent / "docs"
PAGES = [page for page in sorted(DOCS.rglob("*.md")) if "auto_tutorials" not in page.parts and blocks_of(page)]
#: Packages that pages import, and that not every environment has.
OPTIONAL = ["attn_gym", "diffusers", "flexmask_attention_gym", "flexmask_transformers", "transformers", "trl", "x_transformers"]


def forks(page: Path) -> bool:
    """Whether a page starts ranks as forks, which need a parent without threads: a process of its own."""
    return 'start_method="fork"' in page.read_text()


def run_in_fork(_: int, page: Path) -> None:
    run_page(page)


def is_slow(page: Path) -> bool:
    return forks(page) or page.name == "compile_lengths.md"  # which compiles with Inductor


@pytest.mark.parametrize(
    "page",
    [pytest.param(page, marks=[pytest.mark.slow] if is_slow(page) else []) for page in PAGES],
    ids=lambda page: page.relative_to(DOCS).with_suffix("").as_posix(),
)
def test_page_runs(page: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    imported = set(re.findall(r"^(?:import|from) (\w+)", page.read_text(), re.MULTILINE))
    for package in imported.intersection(OPTIONAL):
        if importlib.util.find_spec(package) is None:
            pytest.skip(f"{package} is not installed")
    if forks(page):
        fork_ranks(1, run_in_fork, (page,))
        return
    monkeypatch.chdir(tmp_path)
    run_page(page)
    plt.close("all")


def test_links_lead_to_files() -> None:
    """In a checkout and on GitHub, without what the build of the documentation writes."""
    links = []
    for page in sorted(DOCS.rglob("*.md")):
        if "auto_tutorials" not in page.parts:
            prose = re.sub(r"^```.*?^```$", "", page.read_text(), flags=re.DOTALL | re.MULTILINE)
            links += [(page, link) for link in re.findall(r"\]\(([^)#]+)[^)]*\)", prose) if not link.startswith("https://")]
    assert len(links) >= 40
    broken = [f"{page.name}: {link}" for page, link in links if "auto_tutorials" in link or not (page.parent / link).is_file()]
    assert broken == []


def documented() -> set[str]:
    """The full names that the reference describes."""
    found = set()
    for page in (DOCS / "reference").glob("*.rst"):
        lines = page.read_text().splitlines()
        for line, following in zip(lines, [*lines[1:], ""], strict=True):
            if match := re.match(r" *\.\. (auto\w+|named-masks|py:type):: ([\w.]+)", line):
                kind, name = match.groups()
                if kind == "named-masks":
                    found |= {f"flexmask.{mask}" for mask in OWN_MASKS if registry.origin(mask).family == name}
                elif kind == "automodule" and ":no-members:" not in following:
                    found |= {f"{name}.{member}" for member in import_module(name).__all__}
                elif in_module := re.match(r" *:module: ([\w.]+)", following):
                    name = f"{in_module[1]}.{name}"
                found.add(name if name.startswith("flexmask.") else f"flexmask.{name}")
            found |= set(re.findall(r"``(flexmask\.\w+)``", line))
    return found


def test_the_reference_has_every_public_name() -> None:
    """Names at the top may stand under their package."""
    found = documented()
    top = {name.rpartition(".")[2] for name in found}
    assert [name for name in [*fm.__all__, *OWN_MASKS] if name not in {*top, "errors", "masks"}] == []
    packages = [f"flexmask.{package}" for package in PACKAGES]
    listed = [
        f"{package}.{name}" for package in packages if package != "flexmask.errors" for name in import_module(package).__all__
    ]
    missing = [name for name in listed if name not in found and name.rpartition(".")[2] not in fm.__all__]
    assert missing == []


def test_figures_are_those_of_the_committed_results() -> None:
    figure = r"[\d,.]+ (?:µs|ms|s)\b"
    results = (path.read_text() for path in (DOCS.parent / "benchmarks" / "results").glob("*.md"))
    measured = set(re.findall(figure, "".join(results)))
    quoted = re.findall(figure, (DOCS / "concepts" / "performance.md").read_text())
    assert len(quoted) >= 20
    assert [number for number in quoted if number not in measured] == []


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

"""Plugins: the example of plugins/README.md as a user follows it, and what happens when packages go wrong or disagree.

The other packages here are written into a folder with the metadata that an installer would leave, and seen by a process of
their own.
"""

from __future__ import annotations

import os
import pickle
import re
import shlex
import subprocess
import sys
import sysconfig
import tomllib
import venv
from pathlib import Path
from textwrap import dedent

import pytest
import torch
from click.testing import CliRunner, Result

import flexmask as fm
from flexmask.cli import main
from flexmask.errors import DuplicateNameError, ExpressionError, FlexmaskError
from flexmask.expr.names import NAMES
from flexmask.expr.tables import param
from flexmask.registry import GROUP, named, per_token
from tests.support.examples import OWN_MASKS

ROOT = Path(__file__).parent.parent
README = (ROOT / "plugins" / "README.md").read_text()
#: The files of the example: a path by itself on a line, and a block of code.
EXAMPLE = re.findall(r"^`([\w./-]+)`\n\n```\w+\n(.*?)^```", README, re.DOTALL | re.MULTILINE)

ONE = """
from flexmask import kv
from flexmask.registry import named

@named
def {name}(every: int = 2):
    '''One key in so many.

    Predicate: ``kv % every == 0``
    '''
    return kv % every == 0
"""


def write(folder: Path, package: str, source: str, module: str = "", entry: str = "") -> None:
    """A package as it lies there when it is installed: one module, and its metadata with one entry point."""
    module = module or package.replace("-", "_")
    (folder / f"{module}.py").write_text(dedent(source))
    info = folder / f"{package.replace('-', '_')}-1.5.dist-info"
    info.mkdir()
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {package}\nVersion: 1.5\n")
    (info / "entry_points.txt").write_text(f"[{GROUP}]\nfamily = {entry or module}\n")


def python(folder: Path, code: str, *options: str) -> subprocess.CompletedProcess[str]:
    """Runs code in a process that sees the packages in a folder."""
    environment = {**os.environ, "PYTHONPATH": str(folder), "COLUMNS": "80"}
    command = [sys.executable, *options, "-c", dedent(code)]
    return subprocess.run(command, capture_output=True, text=True, env=environment, cwd=folder)


def printed(folder: Path, code: str) -> list[str]:
    done = python(folder, code)
    assert done.returncode == 0, done.stderr
    return done.stdout.splitlines()


def command(folder: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    return python(folder, f"import sys; sys.argv = ['flexmask', *{arguments!r}]; from flexmask.cli import main; main()")


# ---------------------------------------------------------------- the example of plugins/README.md


@pytest.fixture(scope="module")
def installed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The interpreter of a fresh environment, with the example installed as plugins/README.md says.

    The environment sees this one's packages, so that torch need not be installed again.
    """
    folder = tmp_path_factory.mktemp("plugin")
    for path, text in EXAMPLE:
        (folder / path).parent.mkdir(exist_ok=True)
        (folder / path).write_text(text)
    venv.create(folder / "env", with_pip=False, symlinks=True)
    interpreter = folder / "env" / "bin" / "python"
    here = sysconfig.get_path("purelib")
    there = sysconfig.get_path("purelib", vars={"base": str(folder / "env")})
    (Path(there) / "outer.pth").write_text(f"import site; site.addsitedir({here!r})\n")
    (line,) = re.findall(r"^pip (install .*)$", README, re.MULTILINE)
    pip = [str(interpreter), "-m", "pip", *shlex.split(line), "--quiet", "--no-index", "--no-build-isolation"]
    done = subprocess.run(pip, capture_output=True, text=True, cwd=folder)
    assert done.returncode == 0, done.stderr
    return interpreter


def test_the_example_is_about_ten_lines() -> None:
    code = re.sub(r'""".*?"""', "", "\n".join(text for _, text in EXAMPLE), flags=re.DOTALL)
    assert len(EXAMPLE) == 2
    assert 8 <= len([line for line in code.splitlines() if line.strip()]) <= 12


@pytest.mark.slow
def test_the_example_works_in_the_command_line(installed: Path) -> None:
    shown = {}
    for line in re.findall(r"^flexmask (.*)$", README, re.MULTILINE):
        command = [str(installed), "-m", "flexmask", *shlex.split(line)]
        done = subprocess.run(command, capture_output=True, text=True, env={**os.environ, "COLUMNS": "80"})
        assert done.returncode == 0, done.stderr
        shown[line.split()[0]] = done.stdout
    assert shown["list"].startswith("landmarks(every)\n")
    assert "■ ⬚ ⬚ ■ ⬚ ⬚ ■" in shown["list"]
    assert shown["list"].endswith("Family landmarks, package flexmask-landmarks 1.0\n")
    assert shown["render"].startswith("causal & landmarks(every=4)\n")
    assert "# . . . # ." in shown["render"]


@pytest.mark.slow
def test_the_example_works_in_python_and_its_picture_is_true(installed: Path) -> None:
    (block,) = re.findall(r"```python\n(import flexmask\n.*?)```", README, re.DOTALL)
    lines = re.findall(r"^ {8}([■⬚ ]+)$", README, re.MULTILINE)
    square, wide = ([line.split(" " * 5)[side] for line in lines if side < len(line.split(" " * 5))] for side in (0, 1))
    code = "m = flexmask.parse('landmarks(every=3)'); print(); print(m.dense(4).tolist(), m.dense(3, 7).tolist())"
    done = subprocess.run([installed, "-c", f"{block}\n{code}"], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    drawn = [[[[cell == "■" for cell in line.split()] for line in side]] for side in (square, wide)]
    assert done.stdout.splitlines()[-1] == f"[{drawn[0]}] [{drawn[1]}]"


# ---------------------------------------------------------------- loading


def test_known_names_load_no_plugin(tmp_path: Path) -> None:
    write(tmp_path, "eager", ONE.format(name="landmarks"))
    code = """
        import sys, flexmask
        flexmask.parse("causal & ~key_padding(lengths=[3]) & where(q < 2, full, minimum(q, kv) < 3)")
        flexmask.masks.causal
        print("eager" in sys.modules, "importlib.metadata" in sys.modules)
        flexmask.parse("causal & landmarks")
        print("eager" in sys.modules)
    """
    assert printed(tmp_path, code) == ["False False", "True"]


@pytest.mark.parametrize(
    "use",
    [
        "flexmask.parse('landmarks & causal')",
        "flexmask.parse('landmarks(every=3)')",
        "flexmask.masks.landmarks(every=3)",
        "dir(flexmask.masks).index('landmarks')",
        "exec('from flexmask.masks import landmarks')",
        "flexmask.parse('document(ids)')",
    ],
)
def test_every_use_of_another_name_loads_plugins_once(use: str, tmp_path: Path) -> None:
    write(tmp_path, "eager", "print('imported')\n" + dedent(ONE.format(name="landmarks")))
    code = f"import flexmask\n{use}\n{use}\nprint(flexmask.parse('landmarks(every=3)'))"
    assert printed(tmp_path, code) == ["imported", "landmarks(every=3)"]


@pytest.mark.slow
def test_masks_of_plugins_are_masks(tmp_path: Path) -> None:
    write(tmp_path, "eager", ONE.format(name="landmarks"))
    code = """
        import flexmask
        mask = flexmask.parse("landmarks(every=n) | causal").bind(n=3)
        print(mask, flexmask.parse(str(mask)) == mask, mask.dense(2, 4).int().tolist())
        print(flexmask.masks.landmarks(), flexmask.parse("landmarks"))
    """
    dense = [[[[1, 0, 0, 1], [1, 1, 0, 1]]]]
    assert printed(tmp_path, code) == [f"landmarks(every=3) | causal True {dense}", "landmarks landmarks"]


def test_unknown_names_get_the_nearest_of_all(tmp_path: Path) -> None:
    write(tmp_path, "eager", ONE.format(name="landmarks"))
    code = """
        import flexmask
        for use in (lambda: flexmask.parse("landmark"), lambda: flexmask.parse("landmark(3)"), lambda: flexmask.masks.landmark):
            try:
                use()
            except (flexmask.errors.TextError, AttributeError) as error:
                print(str(error).splitlines()[0])
    """
    assert printed(tmp_path, code) == [
        "landmark is not a named mask. Did you mean landmarks?",
        "there is no mask or function landmark. Did you mean landmarks?",
        "there is no named mask landmark. Did you mean landmarks? `flexmask list` shows all; plugins add more",
    ]


def test_a_plugin_may_read_text_while_it_is_imported(tmp_path: Path) -> None:
    write(tmp_path, "a-first", ONE.format(name="landmarks"))
    reading = ONE.format(name="other") + "\nimport flexmask\nprint(flexmask.parse('landmarks & other & (kv < n)'))\n"
    write(tmp_path, "b-second", reading)
    assert printed(tmp_path, "import flexmask; flexmask.parse('other')") == ["landmarks & other & (kv < n)"]


def test_threads_wait_for_the_one_that_loads(tmp_path: Path) -> None:
    write(tmp_path, "slow", "import time\nprint('imported')\ntime.sleep(0.3)\n" + dedent(ONE.format(name="landmarks")))
    code = """
        import flexmask
        from concurrent.futures import ThreadPoolExecutor
        with ThreadPoolExecutor(8) as pool:
            print({str(mask) for mask in pool.map(flexmask.parse, ["landmarks & causal"] * 16)})
    """
    assert printed(tmp_path, code) == ["imported", "{'landmarks & causal'}"]


def test_a_plugin_that_was_imported_before(tmp_path: Path) -> None:
    write(tmp_path, "the-plugin", ONE.format(name="landmarks"))
    code = """
        import flexmask, the_plugin
        from flexmask.registry import origin
        print(flexmask.parse("landmarks & document(ids)"), flexmask.masks.landmarks is the_plugin.landmarks)
        print(origin("landmarks"))
    """
    place = "Origin(package='the-plugin', version='1.5', family='family')"
    assert printed(tmp_path, code) == ["landmarks & document(ids=ids) True", place]


def test_flexmask_registers_its_families_as_plugins_do() -> None:
    entries = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["entry-points"][GROUP]
    modules = {NAMES[name].__module__ for name in OWN_MASKS}
    assert {name: module for module in sorted(modules) for name in [module.rpartition(".")[2]]} == entries


def test_pickles_import_the_plugin_that_they_need(tmp_path: Path) -> None:
    write(tmp_path, "eager", ONE.format(name="landmarks"))
    write(tmp_path, "other", "print('imported other')\n" + dedent(ONE.format(name="elsewhere")))
    store = """
        import flexmask, pickle
        with open("mask.pickle", "wb") as file:
            pickle.dump(flexmask.parse("landmarks(every=n) & causal"), file)
    """
    assert printed(tmp_path, store) == ["imported other"]
    code = """
        import pickle, sys
        mask = pickle.load(open("mask.pickle", "rb"))
        print(mask, mask.bind(n=3))
        import flexmask
        print(mask == flexmask.parse("landmarks(every=n) & causal"), flexmask.masks.landmarks().define.__module__)
    """
    assert printed(tmp_path, code) == ["landmarks(every=n) & causal landmarks(every=3) & causal", "imported other", "True eager"]


# ---------------------------------------------------------------- packages that go wrong

BROKEN = {
    "an error": ("raise RuntimeError('no luck')", "RuntimeError: no luck"),
    "a missing module": ("import no_such_module", "ModuleNotFoundError: No module named 'no_such_module'"),
    "an exit": ("raise SystemExit(3)", "SystemExit: 3"),
    "no Python": ("def", "SyntaxError: "),
    "a name of text": ("from flexmask.registry import named\ndef table(): ...\nnamed(table)", "table is the name of a symbol"),
    "a name twice": (ONE.format(name="landmarks") * 2, "broken defines two masks named landmarks"),
}


@pytest.mark.parametrize("kind", BROKEN)
def test_a_broken_plugin_is_a_warning(kind: str, tmp_path: Path) -> None:
    source, said = BROKEN[kind]
    write(tmp_path, "a-broken", dedent(ONE.format(name="half")) + source, module="broken")
    write(tmp_path, "working", ONE.format(name="whole"))
    code = """
        import warnings, flexmask
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            mask = flexmask.parse("whole & (kv < half)")  # what it registered before it broke is a free name again
            flexmask.parse("whole & (kv < half)")
        print(mask.params, len(caught), caught[0].category.__name__)
        print(caught[0].message)
    """
    params, message = printed(tmp_path, code)
    assert params == "('half',) 1 PluginWarning"
    assert message.startswith("the plugin a-broken cannot be loaded, so its masks are missing: its entry point family = broken")
    assert said.replace("broken defines", "a-broken defines") in message
    assert message.endswith("`pip install -U a-broken` may fix it; `pip uninstall a-broken` removes it")


def test_a_broken_plugin_can_be_imported_again(tmp_path: Path) -> None:
    """What it registered is taken back, so that its user sees the reason, and not names that are there already."""
    write(tmp_path, "broken", ONE.format(name="half") + "raise RuntimeError('no luck')\n")
    done = python(tmp_path, "import flexmask\nflexmask.parse('document(ids)')\nimport broken")
    assert done.stderr.rstrip().endswith("RuntimeError: no luck")


def test_a_missing_module_of_an_entry_point(tmp_path: Path) -> None:
    write(tmp_path, "moved", ONE.format(name="landmarks"), entry="moved.elsewhere:thing")
    done = python(tmp_path, "import flexmask; print(flexmask.parse('causal & document(ids)'))")
    assert done.stdout == "causal & document(ids=ids)\n"
    assert "family = moved.elsewhere:thing raised ModuleNotFoundError" in done.stderr


def test_of_two_entry_points_one_is_broken(tmp_path: Path) -> None:
    write(tmp_path, "half", ONE.format(name="whole"), entry="half\nother = half_broken")
    (tmp_path / "half_broken.py").write_text(ONE.format(name="lost") + "raise RuntimeError('no luck')\n")
    done = python(tmp_path, "import flexmask; print(flexmask.parse('whole & (kv < lost)').params)")
    assert done.stdout == "('lost',)\n"
    assert done.stderr.count("PluginWarning") == 1
    assert "its entry point other = half_broken raised RuntimeError: no luck" in done.stderr


def test_warnings_as_errors_leave_everything_loaded(tmp_path: Path) -> None:
    write(tmp_path, "a-broken", "raise RuntimeError('no luck')")
    write(tmp_path, "working", ONE.format(name="whole"))
    code = """
        import flexmask
        try:
            flexmask.parse("whole")
        except flexmask.errors.PluginWarning as warning:
            print("warned")
        print(flexmask.parse("whole & (kv < n)"))
    """
    done = python(tmp_path, code, "-W", "error")
    assert done.stdout.splitlines() == ["warned", "whole & (kv < n)"], done.stderr


def test_an_interrupt_goes_through_and_loading_begins_anew(tmp_path: Path) -> None:
    source = "import sys\nif not hasattr(sys, 'tried'):\n    sys.tried = True\n    raise KeyboardInterrupt\n"
    write(tmp_path, "interrupted", dedent(ONE.format(name="landmarks")) + source)
    code = """
        import flexmask
        try:
            flexmask.parse("landmarks")
        except KeyboardInterrupt:
            print("interrupted")
        print(flexmask.parse("landmarks"))
    """
    assert printed(tmp_path, code) == ["interrupted", "landmarks"]


def test_a_plugin_that_registers_nothing(tmp_path: Path) -> None:
    write(tmp_path, "idle", "from flexmask import kv\n\ndef landmarks():\n    return kv % 2 == 0\n")
    done = python(tmp_path, "import flexmask; flexmask.parse('landmarks(3)')")
    assert "PluginWarning: the plugin idle registers no mask: importing its entry point family = idle has to" in done.stderr
    assert "there is no mask or function landmarks." in done.stderr


def test_a_plugin_whose_masks_lie_in_another_module(tmp_path: Path) -> None:
    write(tmp_path, "divided", "import divided_parts\n")
    (tmp_path / "divided_parts.py").write_text(ONE.format(name="landmarks"))
    code = "import flexmask; flexmask.parse('landmarks'); from flexmask.registry import origin; print(origin('landmarks'))"
    done = python(tmp_path, code)
    assert done.stdout == "Origin(package='divided', version=None, family='divided_parts')\n"
    assert done.stderr == ""


# ---------------------------------------------------------------- two packages with one name


def refusals(folder: Path, code: str, *texts: str) -> list[str]:
    """What reading each text gives, or the first line of what is said against it."""
    return printed(
        folder,
        dedent(code)
        + dedent(
            f"""
            import flexmask
            for text in {texts!r}:
                try:
                    print(flexmask.parse(text))
                except flexmask.errors.DuplicateNameError as error:
                    print(error)
            """
        ),
    )


def test_two_plugins_with_one_name(tmp_path: Path) -> None:
    write(tmp_path, "one", ONE.format(name="landmarks") + ONE.format(name="only_one"))
    write(tmp_path, "two", ONE.format(name="only_two") + ONE.format(name="landmarks"))
    write(tmp_path, "zoo", ONE.format(name="zebra"))
    said = "two packages define a mask named landmarks: one and two. Give one of them another name, or run `pip uninstall two`"
    said += ", or run `pip uninstall one`"
    texts = ("causal", "landmarks", "only_one", "only_two", "causal & document(ids)", "zebra", "landmarks", "causal")
    expected = ["causal", said, said, said, said, "zebra", said, "causal"]
    assert refusals(tmp_path, "", *texts) == expected
    assert refusals(tmp_path, "", *reversed(texts)) == expected[::-1]  # whichever is asked for first


def test_plugins_with_one_name_whose_masks_lie_in_other_modules(tmp_path: Path) -> None:
    for package in ("one", "two"):
        write(tmp_path, package, f"import helpers_of_{package}")
        (tmp_path / f"helpers_of_{package}.py").write_text(ONE.format(name="landmarks") + ONE.format(name=f"only_{package}"))
    said = "two packages define a mask named landmarks: one and two. Give one of them another name, or run `pip uninstall two`"
    assert refusals(tmp_path, "", "only_one", "only_two") == [said + ", or run `pip uninstall one`"] * 2


def test_two_modules_of_a_plugin_with_one_name(tmp_path: Path) -> None:
    write(tmp_path, "divided", "import some_parts\nimport other_parts\n")
    for module in ("some_parts", "other_parts"):
        (tmp_path / f"{module}.py").write_text(ONE.format(name="landmarks"))
    done = python(tmp_path, "import flexmask; print(flexmask.parse('causal')); flexmask.parse('landmarks')")
    assert done.stdout == "causal\n"
    assert "DuplicateNameError: divided defines two masks named landmarks. Give one another name" in done.stderr


def test_a_plugin_with_a_name_of_flexmask(tmp_path: Path) -> None:
    write(tmp_path, "one", ONE.format(name="causal"))
    said = "two packages define a mask named causal: flexmask and one. Give one of them another name, or run `pip uninstall one`"
    assert refusals(tmp_path, "", "causal & full", "landmarks") == ["causal", said]


def test_a_plugin_with_a_name_of_the_script(tmp_path: Path) -> None:
    write(tmp_path, "one", ONE.format(name="landmarks"))
    said = "two packages define a mask named landmarks: the running script (__main__) and one. "
    said += "Give one of them another name, or run `pip uninstall one`"
    assert refusals(tmp_path, ONE.format(name="landmarks"), "landmarks", "other & causal") == ["landmarks", said]


def test_the_script_takes_a_name_of_a_plugin(tmp_path: Path) -> None:
    write(tmp_path, "the-one", ONE.format(name="landmarks"))
    done = python(tmp_path, "import flexmask; flexmask.parse('landmarks')\n" + dedent(ONE.format(name="landmarks")))
    assert "landmarks: the-one and the running script (__main__). Give one of them another name, or run" in done.stderr


def test_a_name_in_use_says_by_which_package() -> None:
    with pytest.raises(DuplicateNameError, match="a mask named causal: flexmask and tests") as caught:

        @named
        def causal() -> fm.Mask:
            return fm.full()

    assert (caught.value.name, caught.value.packages) == ("causal", ("flexmask", "tests"))


def test_the_error_about_a_name_survives_pickling() -> None:
    error = DuplicateNameError("landmarks", "one", "two")
    again = pickle.loads(pickle.dumps(error))
    assert (str(again), again.name, again.packages) == (str(error), "landmarks", ("one", "two"))


@pytest.mark.parametrize("name", ["q", "where", "_hidden", "<lambda>"])
def test_names_that_text_cannot_have(name: str) -> None:
    def define() -> fm.Mask:
        return fm.full()

    define.__name__ = name
    with pytest.raises(ExpressionError, match=re.escape(name)):
        named(define)


# ---------------------------------------------------------------- what a plugin's functions are given


def test_data_becomes_a_tensor() -> None:
    tensor = torch.tensor([1, 2])
    assert fm.table(tensor).to_tensor() is tensor
    for data in ([[1, 2], [3, 4]], [True, False], 7):
        made = fm.table(data).to_tensor()
        assert (made.tolist(), made.dtype) == (data, torch.tensor(data).dtype)
    lengths = fm.expr.document_ids(lengths=[3, 4])
    assert isinstance(lengths, fm.expr.Table)
    with pytest.raises(FlexmaskError, match="has no values"):
        lengths.to_tensor()


# ---------------------------------------------------------------- flexmask list


def listed(*arguments: str, columns: int = 80) -> Result:
    return CliRunner(env={"COLUMNS": str(columns), "FORCE_COLOR": None}).invoke(main, ["list", *arguments])


@pytest.mark.parametrize("columns", [60, 80, 160])
def test_list_shows_every_mask(columns: int) -> None:
    result = listed(columns=columns)
    assert result.exit_code == 0, result.output
    lines = result.stdout.splitlines()
    assert "\x1b" not in result.stdout
    assert max(map(len, lines)) <= columns
    assert [name for name in OWN_MASKS if not re.search(rf"^  {name}\(", result.stdout, re.MULTILINE)] == []
    assert re.search(r"^windows +package flexmask$", result.stdout, re.MULTILINE)
    assert re.search(r"^  full\(\) +True$", result.stdout, re.MULTILINE)
    assert [line for line in lines if line != line.rstrip()] == []


@pytest.mark.parametrize("name", ["causal", "sliding_window", "per_document"])
def test_list_describes_one_mask(name: str) -> None:
    result = listed(name)
    assert result.exit_code == 0
    assert result.stdout.startswith(f"{name}(")
    assert "Predicate: ``" in result.stdout
    assert "■" in result.stdout
    assert re.search(r"\nFamily \w+, package flexmask \d\S+\n$", result.stdout)


def test_list_of_an_unknown_name() -> None:
    result = listed("slidingwindow")
    assert (result.exit_code, result.stdout) == (2, "")
    assert "Error: there is no named mask slidingwindow. Did you mean sliding_window?" in result.stderr


def test_data_of_each_token_with_and_without_a_batch() -> None:
    """What `document` takes, for authors of masks: ``[S]``, ``[B, S]`` and parameters."""
    for ids in ([0, 0, 1], [[0, 0, 1], [0, 1, 1]], torch.tensor([[0, 0, 1], [0, 1, 1]]), param("ids")):
        same = per_token(ids, fm.q, "mine: ids") == per_token(ids, fm.kv, "mine: ids")
        assert same & (per_token(ids, fm.q, "mine: ids") >= 0) == fm.document(ids).expand()
    for wrong, message in (
        (torch.zeros(2), "mine: ids must hold integers or truth values, got torch.float32"),
        ([True, False], "mine: ids must hold integers, got truth values"),
        (torch.zeros(1, 1, 1, dtype=torch.int64), r"mine: ids must have the axes \[positions\] or \[batch, positions\]"),
    ):
        with pytest.raises(FlexmaskError, match=message):
            per_token(wrong, fm.q, "mine: ids")


def test_list_shows_plugins_by_package(tmp_path: Path) -> None:
    write(tmp_path, "zoo", ONE.format(name="zebra"))
    write(tmp_path, "undescribed", ONE.format(name="landmarks").replace("Predicate: ``kv % every == 0``", ""))
    lines = command(tmp_path, "list").stdout.splitlines()
    place = [re.sub(" +", " ", line) for line in lines].index("family package zoo")
    assert re.sub(" +", " ", lines[place + 1]) == " zebra(every=2) kv % every == 0"
    assert any(re.fullmatch(r"  landmarks\(every=2\) +One key in so many\.", line) for line in lines)
    assert command(tmp_path, "list", "zebra").stdout.endswith("\nFamily family, package zoo 1.5\n")


def test_list_tells_of_broken_plugins_in_a_line(tmp_path: Path) -> None:
    write(tmp_path, "broken", "raise RuntimeError('no luck')")
    done = command(tmp_path, "list")
    assert done.returncode == 0
    assert "causal" in done.stdout
    assert done.stderr.startswith("Warning: the plugin broken cannot be loaded")
    assert done.stderr.count("\n") == 1
    assert command(tmp_path, "list", "causal").stderr == ""


def test_list_refuses_two_packages_with_one_name(tmp_path: Path) -> None:
    write(tmp_path, "one", ONE.format(name="landmarks"))
    write(tmp_path, "two", ONE.format(name="landmarks"))
    done = command(tmp_path, "list")
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr.startswith("Error: two packages define a mask named landmarks: one and two.")
    assert command(tmp_path, "list", "causal").returncode == 0

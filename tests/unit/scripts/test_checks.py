"""The project's own checks find what they are there to find."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path

import pytest

SCRIPTS = Path(__file__).parents[3] / "scripts"


def load(name: str):
    spec = importlib.util.spec_from_file_location(f"checks_{name}", SCRIPTS / f"{name}.py")
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module


layers = load("check_layers")
sizes = load("check_sizes")
faults = load("check_faults")
docs = load("check_docs")
seed_table = load("check_seed_table")


@pytest.fixture
def source(tmp_path):
    """A small package that obeys every rule."""
    for name, text in {
        "__init__.py": "",
        "errors.py": "",
        "hashing.py": "from kvkeep.errors import X\n",
        "memory/__init__.py": "",
        "memory/base.py": "import torch\nfrom kvkeep import keys\n",
        "engine.py": "from kvkeep.memory.base import Y\n",
        "connectors/vllm/__init__.py": "import vllm.config\n",
        "testing/__init__.py": "from kvkeep import engine\nimport vllm\n",
    }.items():
        path = tmp_path / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return tmp_path


def test_a_package_that_obeys_passes(source):
    assert layers.Checker(source).run() == []
    assert layers.main([str(source)]) == 0


@pytest.mark.parametrize(
    ("name", "text", "message"),
    [
        (
            "hashing.py",
            "from kvkeep.engine.engine import X",
            "hashing (layer 0) imports engine (layer 5)",
        ),
        (
            "hashing.py",
            "import kvkeep.memory.base",
            "hashing (layer 0) imports memory.base (layer 2)",
        ),
        ("hashing.py", "def f():\n    from kvkeep import memory", "imports memory (layer 2)"),
        (
            "hashing.py",
            "try:\n    import torch\nexcept ImportError: pass",
            "torch may be imported in",
        ),
        ("config.py", "import torch.nn", "torch may be imported in"),
        (
            "engine.py",
            "from vllm import LLM",
            "vllm may be imported in connectors.vllm, demo.vllm_run only",
        ),
        (
            "connectors/hf.py",
            "import vllm",
            "vllm may be imported in connectors.vllm, demo.vllm_run only",
        ),
        ("engine.py", "import asyncio", "asyncio may be imported in storage, backends, lookup"),
        ("memory/new.py", "from . import base", "relative import"),
        ("engine.py", "from kvkeep.testing import x", "engine imports testing"),
        ("__init__.py", "from kvkeep.testing import x", "kvkeep imports testing"),
        ("helper.py", "", "has no layer"),
        ("errors.py", "import kvkeep.hashing", "circle of imports: errors -> hashing -> errors"),
    ],
)
def test_a_violation_of_the_layers_is_found(source, name, text, message, capsys):
    (source / name).write_text(text)
    problems = layers.Checker(source).run()
    assert any(message in problem for problem in problems), problems
    assert layers.main([str(source)]) == 1
    assert message in capsys.readouterr().out


def test_imports_for_type_checkers_do_not_count(source):
    text = "from typing import TYPE_CHECKING\nif TYPE_CHECKING:\n    from kvkeep.engine import E\n"
    (source / "hashing.py").write_text(text)
    assert layers.Checker(source).run() == []
    (source / "hashing.py").write_text(text + "else:\n    from kvkeep.engine import E\n")
    assert layers.Checker(source).run() != []


def test_this_project_obeys_its_layers():
    assert layers.main([]) == 0


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("x = 1\n" * 801, "801 lines"),
        ("def f():\n" + "    x = 1\n" * 61, "f has 61 lines"),
        ("def f(a, b, c, d, e, g, h):\n    return a\n", "f has 7 parameters"),
        ("def _f(a, *, b, c, d, e, g, h):\n    return a\n", "_f has 7 parameters"),
        ("class A:\n    def f(self, a, b, c, d, e, g, h):\n        return a\n", "7 parameters"),
    ],
)
def test_what_is_too_large_is_found(tmp_path, text, message):
    path = tmp_path / "module.py"
    path.write_text(text)
    assert any(message in problem for problem in sizes.problems_of(path))
    assert sizes.main([str(tmp_path)]) == 1


def test_what_is_large_enough_passes(tmp_path):
    body = '    """A.\n' + "\n    text\n" * 40 + '    """\n' + "    x = 1\n" * 60
    (tmp_path / "module.py").write_text(f"def f(self, a, b, c, d, e, g, *, h, i):\n{body}")
    assert sizes.main([str(tmp_path)]) == 0


def test_faults_are_read_from_docstrings():
    assert faults.named_faults("Fault 7: x") == {7}
    assert faults.named_faults("Faults 7, 8 and 12: x. Fault 1.") == {1, 7, 8, 12}
    assert faults.named_faults("no fault at all, 7 times") == set()


def test_faults_are_found_in_functions_and_classes(tmp_path):
    folder = tmp_path / "tests"
    folder.mkdir()
    (folder / "test_a.py").write_text(
        'def test_one():\n    """Fault 3: a."""\n'
        'class TestB:\n    def test_two(self):\n        """Faults 3, 4: b."""\n'
        '    def helper(self):\n        """Fault 5."""\n'
    )
    assert faults.tests_by_fault(folder) == {
        3: ["tests/test_a.py::test_one", "tests/test_a.py::TestB::test_two"],
        4: ["tests/test_a.py::TestB::test_two"],
    }
    assert "| 4 |" in faults.table(faults.tests_by_fault(folder))


def test_anchors_are_those_of_a_renderer():
    text = "# One `two` (3)\n\n```\n# no heading\n```\n\n## [Link](x) & more\n"
    assert docs.anchors(text) == {"one-two-3", "link--more"}


def test_broken_links_and_missing_names_are_found(tmp_path, monkeypatch):
    monkeypatch.setattr(docs, "ROOT", tmp_path)
    (tmp_path / "src" / "kvkeep").mkdir(parents=True)
    (tmp_path / "src" / "kvkeep" / "hashing.py").write_text("")
    (tmp_path / "b.md").write_text("# There\n")
    path = tmp_path / "a.md"
    path.write_text(
        "[x](b.md#there) [y](c.md) [z](b.md#not-there) `hashing.py` `none.py` [w](https:x)"
    )
    assert docs.broken_links(path) == ["a.md: no file c.md", "a.md: no heading b.md#not-there"]
    assert docs.missing_modules(path) == ["a.md: names none.py, which is not there"]
    path.write_text("`kvkeep.hashing` `kvkeep.hashing.split_layers` `kvkeep.none.at_all`")
    assert docs.missing_modules(path) == ["a.md: names kvkeep.none.at_all, which is not there"]


def test_a_test_that_is_not_there_and_a_row_without_one_are_found(tmp_path):
    (tmp_path / "test_a.py").write_text(
        "def test_x(): ...\nclass TestA:\n    def test_y(self): ...\n"
    )
    page = tmp_path / "page.md"
    page.write_text(
        "| Statement | Tests |\n|---|---|\n"
        "| a | [test_x](test_a.py)<br>[TestA.test_y](test_a.py)<br>[TestA](test_a.py) |\n"
        "| b | not yet |\n"
        "| c | [test_y](test_a.py)<br>[test_x](test_b.py) |\n"
        "| d | |\n"
    )
    assert seed_table.problems_of(page) == [
        "page.md:5: there is no test_y in test_a.py",
        "page.md:5: there is no test_x in test_b.py",
        "page.md:6: a row without a test",
    ]


def test_the_seed_table_names_tests_that_are_there():
    assert seed_table.problems_of(seed_table.PAGE) == []

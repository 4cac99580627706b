"""``kvkeep replay``: the table, the sentence, JSON, and what is refused."""

from __future__ import annotations

import importlib.util
import json
import struct
import sys

import pytest
from typer.testing import CliRunner

from kvkeep.cli.main import app


@pytest.fixture
def run(monkeypatch):
    monkeypatch.setenv("COLUMNS", "80")
    return lambda *arguments: CliRunner().invoke(app, ["replay", *map(str, arguments)])


@pytest.fixture
def trace(tmp_path):
    """Two prompts of two blocks in turn, five times."""
    path = tmp_path / "trace.jsonl"
    ids = [[1, 2], [3, 4]] * 5
    path.write_text(
        "".join(
            json.dumps(
                {"timestamp": 1000 * n, "input_length": 20, "output_length": 1, "hash_ids": prompt}
            )
            + "\n"
            for n, prompt in enumerate(ids)
        )
    )
    return path


SMALL = ["--block-tokens", "10", "--block-bytes", "1MiB"]


def test_the_table_has_a_row_per_size_and_a_column_per_policy(run, trace):
    done = run(trace, *SMALL, "--size", "2MiB,4MiB", "--policy", "LRU,fifo")
    assert done.exit_code == 0
    lines = [line.split() for line in done.stdout.splitlines()]
    assert ["pool", "share", "lru", "fifo", "optimum"] in lines
    assert ["4.0", "MiB", "100.0%", "80.0%", "80.0%", "80.0%"] in lines
    [small] = [line for line in lines if line[:2] == ["2.0", "MiB"]]
    assert small[2:4] == ["50.0%", "0.0%"]
    words = " ".join(done.stdout.split())
    assert "10 requests, 200 prompt tokens; 4 blocks in all, 4.0 MiB" in words
    assert "With lru, 2.0 MiB finds 0.0% of all prompt tokens; 2.0 MiB more finds +80.0" in words
    assert max(map(len, done.stdout.splitlines())) <= 80


def test_every_policy_at_once_fits_80_columns(run, trace):
    done = run(
        trace, *SMALL, "--share", "1", "--policy", "reuse,lru,lfu,fifo,mru,probation", "--size",
        "3MiB",
    )  # fmt: skip
    assert done.exit_code == 0
    assert max(map(len, done.stdout.splitlines())) <= 80
    assert all(name in done.stdout for name in ("probation", "optimum", "reuse"))


def test_json_has_every_trace_size_and_policy(run, trace):
    done = run(trace, trace, *SMALL, "--share", "1/2,1.0", "--json", "--policy", "lru")
    assert done.exit_code == 0
    first, second = json.loads(done.stdout)["traces"]
    assert first.pop("seconds") > 0
    assert second.pop("seconds") > 0
    assert first == second
    assert first["footprint_chunks"] == 4
    assert [(one["chunks"], one["bytes"]) for one in first["sizes"]] == [(2, 2 << 20), (4, 4 << 20)]
    assert first["sizes"][1]["policies"]["lru"]["hit_tokens"] == 160
    assert first["sizes"][1]["optimum"]["token_share"] == 0.8
    assert first["limit"]["hit_tokens"] == 160


def test_without_sizes_shares_are_taken(run, trace):
    done = run(trace, *SMALL, "--json")
    [values] = json.loads(done.stdout)["traces"]
    assert [one["chunks"] for one in values["sizes"]] == [1]
    assert list(values["sizes"][0]["policies"]) == ["reuse", "lru"]


@pytest.mark.parametrize(
    "arguments, words",
    [
        (["--size", "64"], "'64': write a size with its unit"),
        (["--size", "1KiB"], "holds no block"),
        (["--size", "4MiB,"], "write a size with its unit"),
        (["--share", "2"], "above 0 and at most 1"),
        (["--share", "0"], "above 0 and at most 1"),
        (["--share", "1/0"], "write 1/16 or 0.25"),
        (["--share", "half"], "write 1/16 or 0.25"),
        (["--policy", "best"], "unknown cache policy 'best'"),
        (["--block-bytes", "0B"], "--block-bytes '0B': must be more than nothing"),
        (["--warm-up", "1"], "at least 0 and below 1"),
        (["--model", "/no/such"], "--model /no/such: cannot read"),
        (["--disk", "1GiB"], "--disk has no effect without --real"),
        (["--real", "--real-bytes", "5KiB"], "must be a multiple of 4KiB"),
        (["--real", "--policy", "probation"], "leave --real out"),
        (["--block-tokens", "7"], "line 1: ValueError: 20 tokens do not fill 2 blocks"),
        (["--block-tokens", "0"], "block-tokens"),
    ],
)
def test_wrong_options_are_one_message_and_2(run, trace, arguments, words):
    done = run(trace, *SMALL, *arguments)
    assert done.exit_code == 2
    assert done.stdout == ""
    assert words in " ".join(done.stderr.split())
    assert "Traceback" not in done.stderr


@pytest.mark.parametrize(
    "content, words",
    [
        (None, "No such file or directory"),
        (b"", "no line is a request"),
        (b"[1]\n", "no line is a request"),
        (b"\xff\xfe\n", "no line is a request"),
        (b'{"prompt_token_ids": [1]}\n', "has no requests that fill a block"),
        (b'{"hash_ids": 1\n', "line 1"),
        (b'{"hash_ids": [1]}\n', "line 1: KeyError"),
    ],
)
def test_wrong_traces_are_one_message_that_names_the_file_and_2(run, tmp_path, content, words):
    path = tmp_path / "t.jsonl"
    if content is not None:
        path.write_bytes(content)
    done = run(path, *SMALL)
    assert done.exit_code == 2
    assert done.stdout == ""
    assert words in done.stderr
    assert str(path) in done.stderr
    assert "Traceback" not in done.stderr


def test_the_plot_is_a_png_of_some_size(run, trace):
    pytest.importorskip("matplotlib")
    path = trace.with_name("rates.png")
    done = run(trace, *SMALL, "--size", "2MiB,4MiB", "--plot", path)
    assert done.exit_code == 0
    data = path.read_bytes()
    assert data.startswith(b"\x89PNG\r\n")
    width, height = struct.unpack(">II", data[16:24])
    assert (width, height) == (1080, 660)
    assert len(data) > 10_000


def test_a_plot_without_the_extra_says_how_to_get_it_before_any_work(run, tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    done = run(tmp_path / "no such trace", "--plot", tmp_path / "x.png")
    assert done.exit_code == 2
    assert "pip install 'kvkeep[plot]'" in done.stderr
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    "number, target, words",
    [
        (1, "none/x.png", "there is no such folder"),
        (2, "x.png", "draws one trace, not 2"),
        (1, "", "Is a directory"),
    ],
)
def test_what_cannot_be_drawn_is_refused(run, trace, number, target, words):
    pytest.importorskip("matplotlib")
    done = run(*[trace] * number, *SMALL, "--plot", trace.parent / target)
    assert done.exit_code == 2
    assert words in " ".join(done.stderr.split())


def test_help_has_an_example(run):
    assert "Example: kvkeep replay trace.jsonl" in run("--help").stdout


def test_the_warm_up_is_left_out_of_the_count(run, trace):
    done = run(trace, *SMALL, "--size", "4MiB", "--policy", "lru", "--warm-up", "0.5", "--json")
    [values] = json.loads(done.stdout)["traces"]
    assert (values["warm_up_requests"], values["asked_tokens"]) == (5, 100)
    assert values["sizes"][0]["policies"]["lru"]["token_share"] == 1.0
    done = run(trace, *SMALL, "--size", "4MiB", "--warm-up", "0.5")
    assert "the first 5 are not counted" in " ".join(done.stdout.split())


def test_a_model_says_how_large_a_block_is(run, trace, tmp_path):
    config = {
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "hidden_size": 64,
        "torch_dtype": "float32",
    }
    (tmp_path / "config.json").write_text(json.dumps(config))
    done = run(trace, "--block-tokens", "10", "--size", "100KiB", "--model", tmp_path, "--json")
    [values] = json.loads(done.stdout)["traces"]
    assert values["block_bytes"] == 10 * 2 * 2 * 64 * 4


def test_the_chart_fits_80_columns_and_names_policies_and_sizes(run, trace):
    pytest.importorskip("plotext")
    done = run(trace, *SMALL, "--size", "1MiB,2MiB,4MiB", "--policy", "lru,fifo", "--chart")
    assert done.exit_code == 0
    lines = done.stdout.splitlines()
    assert max(map(len, lines)) <= 80
    [top] = [number for number, line in enumerate(lines) if "prompt tokens found, %" in line]
    drawn = "\n".join(lines[top : top + 17])
    assert all(name in drawn for name in ("optimum", "lru", "fifo", "1.0 MiB", "4.0 MiB"))


def test_a_chart_without_the_extra_says_how_to_get_it(run, tmp_path, monkeypatch):
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    done = run(tmp_path / "no such trace", "--chart")
    assert done.exit_code == 2
    assert "pip install 'kvkeep[plot]'" in done.stderr


def test_real_bytes_are_compared_and_the_hit_rates_stand_side_by_side(run, trace):
    arguments = [trace, *SMALL, "--size", "4MiB", "--policy", "lru", "--real", "--disk", "8MiB"]
    done = run(*arguments, "--json")
    assert done.exit_code == 0
    [real] = json.loads(done.stdout)["traces"][0]["real"]
    assert real["found"]["hit_tokens"] == real["simulated"]["hit_tokens"] == 160
    assert (real["wrong_chunks"], real["loaded_chunks"], real["disk_chunks"]) == (0, 16, 8)
    done = run(*arguments)
    assert max(map(len, done.stdout.splitlines())) <= 80
    assert "Each of the 16 blocks that were loaded was right." in " ".join(done.stdout.split())


def test_a_wrong_byte_is_exit_code_1(run, trace, monkeypatch):
    from kvkeep.gpu.paged import PagedGPUConnector

    whole = PagedGPUConnector.batched_to_gpu

    def spoil(self, objs, *arguments, **options):
        if len(objs) > 1:  # the self-test moves one at a time
            objs[0].array[5] ^= 1
        whole(self, objs, *arguments, **options)

    monkeypatch.setattr(PagedGPUConnector, "batched_to_gpu", spoil)
    done = run(trace, *SMALL, "--size", "4MiB", "--policy", "lru", "--real")
    assert done.exit_code == 1
    assert "were not those of their tokens" in done.stdout

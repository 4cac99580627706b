"""Workloads of every known form, told apart by what is in them."""

from __future__ import annotations

import json

import pytest

from kvkeep.errors import TraceError
from kvkeep.replay.trace import read_workload

PROMPTS = [[*range(10)], [*range(8), 99, 98, 97], [5, 6], [*range(10)]]


def written(tmp_path, lines):
    path = tmp_path / "workload"
    path.write_text("".join(f"{line}\n" for line in lines))
    return path


def vllm_log(prompts):
    """The lines that vLLM 0.32 writes, with others between."""
    yield "INFO 11-29 17:00:00 [api_server.py:100] Starting vLLM server on http://0.0.0.0:8000"
    for number, ids in enumerate(prompts):
        start = f"(APIServer pid=7) DEBUG 11-29 17:00:{number:02} [request_logger.py:58] "
        text = f"a, prompt_token_ids: [1, 2], prompt_embeds shape: None. {number}"
        yield (
            f"{start}Request cmpl-{number}-0 details: prompt: {text!r}, prompt_token_ids: {ids}, "
            "prompt_embeds shape: None."
        )
        yield f"{start}Received request cmpl-{number}-0: params: P(n=1), lora_request: None."


FORMS = {
    "vLLM": vllm_log(PROMPTS),
    "JSON": [json.dumps({"prompt_token_ids": ids, "max_tokens": 3}) for ids in PROMPTS],
    "completions": [json.dumps({"model": "m", "prompt": ids}) for ids in PROMPTS],
    "several prompts": [json.dumps({"model": "m", "prompt": PROMPTS})],
    "a batch file": [
        json.dumps({"custom_id": "a", "url": "/v1/completions", "body": {"prompt": ids}})
        for ids in PROMPTS
    ],
}


@pytest.mark.parametrize("form", FORMS)
def test_token_ids_are_cut_into_full_chunks_and_named_by_their_prefix(tmp_path, form):
    trace = read_workload(written(tmp_path, FORMS[form]), chunk_tokens=4)
    assert [request.num_tokens for request in trace.requests] == [10, 11, 2, 10]
    first, second, third, again = [request.keys for request in trace.requests]
    assert (len(first), len(second), len(third)) == (2, 2, 0)
    assert first == again == second  # their third chunks are unfull, and not kept
    assert len(set(first)) == 2


def test_equal_tokens_after_other_ones_are_another_chunk(tmp_path):
    lines = [json.dumps({"prompt_token_ids": [*start, 7, 7]}) for start in ([1, 2], [3, 4])]
    one, other = read_workload(written(tmp_path, lines), chunk_tokens=2).requests
    assert not set(one.keys) & set(other.keys)


def test_mooncake_s_form_is_still_read_and_blocks_have_a_size_by_form(tmp_path):
    line = '{"timestamp": 0, "input_length": 700, "output_length": 1, "hash_ids": [1, 2]}'
    assert read_workload(written(tmp_path, ["", line])).chunk_tokens == 512
    line = json.dumps({"prompt_token_ids": [0] * 512})
    assert len(read_workload(written(tmp_path, [line])).requests[0].keys) == 2


@pytest.mark.parametrize(
    "lines, words",
    [
        ([], "no line is a request"),
        (["hello"], "no line is a request"),
        (["x Received request a: params: P, lora_request: None."], "VLLM_LOGGING_LEVEL=DEBUG"),
        (['{"prompt": "text"}'], "line 1 .* tokenised first"),
        (['{"prompt_token_ids": [1]}', "{"], "line 2 is no JSON"),
        (['{"prompt_token_ids": [1, true]}'], "line 1: .* whole numbers"),
        (['{"prompt_token_ids": [-1]}'], "line 1: a token id is negative"),
        (['{"prompt_token_ids": [4294967296]}'], "larger than 4294967295"),
    ],
)
def test_what_is_no_workload_is_told_with_its_line(tmp_path, lines, words):
    with pytest.raises(TraceError, match=words):
        read_workload(written(tmp_path, lines))

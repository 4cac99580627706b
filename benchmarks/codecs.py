"""What do codecs save, how fast are they, and what do lossy ones cost on a real model?

    python benchmarks/codecs.py

SmolLM2-135M-Instruct (the demo's model) reads this project's own texts. Three tables, per element
type of the model: bytes and rates of one thread and of two at once; the perplexity of the tokens
after a prefix whose KV went through the codec; and how many greedy answers are the same. Figures go
to benchmarks/results/codecs.json, too.
"""

from __future__ import annotations

import json
import math
import statistics
import time
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Annotated, Any

import torch
import typer
from transformers import AutoModelForCausalLM, AutoTokenizer

from kvkeep.bench.measure import machine
from kvkeep.codec.base import Codec
from kvkeep.codec.frame import ChunkMeta
from kvkeep.codec.names import CODEC_NAMES, codec_of, decode_chunk, encode_chunk
from kvkeep.connectors.hf.caches import new_cache, set_layer
from kvkeep.demo.model import prepare_model, quiet_transformers, read_document
from kvkeep.layout import MemoryFormat

ROOT = Path(__file__).parent.parent
RESULTS = ROOT / "benchmarks" / "results" / "codecs.json"
CHUNK = 256


def memory_of(values: torch.Tensor) -> memoryview:
    """The bytes of a contiguous tensor."""
    return values.view(torch.uint8).numpy().reshape(-1).data


def chunks_of(cache: Any, num_tokens: int) -> list[torch.Tensor]:
    """The KV of the first tokens as chunks [layers, 2, CHUNK, hidden], as they are in the pool."""
    pairs = [
        torch.stack([part[0].transpose(0, 1).flatten(1) for part in (layer.keys, layer.values)])
        for layer in cache.layers
    ]
    whole = torch.stack(pairs)
    return [
        whole[:, :, start : start + CHUNK].contiguous() for start in range(0, num_tokens, CHUNK)
    ]


def meta_of(chunk: torch.Tensor) -> ChunkMeta:
    layers, two, tokens, hidden = chunk.shape
    dtype = str(chunk.dtype).removeprefix("torch.")
    return ChunkMeta(MemoryFormat.KV_2LTD, dtype, (two, layers, tokens, hidden))


def through(codec: Codec, chunk: torch.Tensor) -> torch.Tensor:
    """What a tier with this codec gives back."""
    out, meta = torch.empty_like(chunk), meta_of(chunk)
    encoded = encode_chunk(codec, memory_of(chunk), meta)
    decode_chunk(encoded.code, encoded.payload, memory_of(out), meta)
    return out


def cache_of(model: Any, chunks: Sequence[torch.Tensor]) -> Any:
    """A cache of one row out of chunks."""
    whole = torch.cat(list(chunks), dim=2)
    heads = model.config.num_key_value_heads
    cache = new_cache(model)
    for layer, pair in zip(cache.layers, whole, strict=True):
        keys, values = (part.unflatten(1, (heads, -1)).transpose(0, 1)[None] for part in pair)
        set_layer(layer, keys.contiguous(), values.contiguous())
    return cache


def rate_of(run: Callable[[], object], num_bytes: int, repeats: int) -> float:
    """GB/s, median of several runs after one that warms up."""
    run()
    times = []
    for _ in range(repeats):
        started = time.perf_counter()
        run()
        times.append(time.perf_counter() - started)
    return num_bytes / statistics.median(times) / 1e9


def measure_rates(chunks: Sequence[torch.Tensor], repeats: int) -> list[dict[str, Any]]:
    """Bytes saved and rates of each codec, in memory, with one thread and with two."""
    rows = []
    metas = [meta_of(chunk) for chunk in chunks]
    sources = [memory_of(chunk) for chunk in chunks]
    outs = [memory_of(torch.empty_like(chunk)) for chunk in chunks]
    num_bytes = sum(len(source) for source in sources)
    with ThreadPoolExecutor(2) as threads:
        for name in CODEC_NAMES[1:]:
            encode = partial(encode_chunk, codec_of(name))
            encoded = list(map(encode, sources, metas))
            codes, payloads = [item.code for item in encoded], [item.payload for item in encoded]
            row: dict[str, Any] = {
                "codec": name,
                "size": sum(len(memoryview(payload)) for payload in payloads) / num_bytes,
            }
            for suffix, apply in (("", map), ("2", threads.map)):
                ahead = partial(apply, encode, sources, metas)
                back = partial(apply, decode_chunk, codes, payloads, outs, metas)
                row["encode" + suffix] = rate_of(partial(drain, ahead), num_bytes, repeats)
                row["decode" + suffix] = rate_of(partial(drain, back), num_bytes, repeats)
            rows.append(row)
    return rows


def drain(start: Callable[[], Iterable[object]]) -> None:
    """Do all of it."""
    deque(start(), maxlen=0)


def perplexities(
    model: Any, ids: torch.Tensor, *, windows: int, prefix: int, scored: int
) -> dict[str, float]:
    """Perplexity of ``scored`` tokens after each of several prefixes, per codec."""
    losses: dict[str, list[float]] = {name: [] for name in CODEC_NAMES}
    stride = (ids.shape[1] - prefix - scored) // windows
    for number in range(windows):
        window = ids[:, number * stride : number * stride + prefix + scored]
        chunks = chunks_of(model(window[:, :prefix], use_cache=True).past_key_values, prefix)
        for name in CODEC_NAMES:
            back = [through(codec_of(name), chunk) for chunk in chunks]
            if not codec_of(name).lossy:
                assert all(map(torch.equal, back, chunks))
                if name != "raw":
                    losses[name].append(losses["raw"][-1])  # the very same KV
                    continue
            logits = model(window[:, prefix:], past_key_values=cache_of(model, back)).logits
            loss = torch.nn.functional.cross_entropy(
                logits[0, :-1].float(), window[0, prefix + 1 :]
            )
            losses[name].append(float(loss))
    return {name: math.exp(statistics.fmean(values)) for name, values in losses.items()}


def agreement(
    model: Any, ids: torch.Tensor, *, prompts: int, prefix: int, answer: int
) -> dict[str, tuple[int, float]]:
    """Per codec: answers that are wholly the same, and tokens up to the first other one.

    The prompt's last token is computed by the model; all chunks before it went through the codec.
    """
    found: dict[str, list[int]] = {name: [] for name in CODEC_NAMES}
    stride = (ids.shape[1] - prefix - 1) // prompts
    for number in range(prompts):
        prompt = ids[:, number * stride : number * stride + prefix + 1]
        chunks = chunks_of(model(prompt[:, :-1], use_cache=True).past_key_values, prefix)
        exact: list[int] = []
        for name in CODEC_NAMES:
            cache = cache_of(model, [through(codec_of(name), chunk) for chunk in chunks])
            out = model.generate(
                prompt,
                attention_mask=torch.ones_like(prompt),
                past_key_values=cache,
                do_sample=False,
                min_new_tokens=answer,
                max_new_tokens=answer,
            )
            tokens = out[0, prompt.shape[1] :].tolist()
            exact = exact or tokens
            pairs = list(zip(exact, tokens, strict=True))
            same = next((i for i, (a, b) in enumerate(pairs) if a != b), answer)
            found[name].append(same)
    return {
        name: (sum(length == answer for length in lengths), statistics.fmean(lengths))
        for name, lengths in found.items()
    }


def main(
    windows: Annotated[int, typer.Option(help="Windows of text for the perplexity.")] = 10,
    prompts: Annotated[int, typer.Option(help="Prompts for the greedy answers.")] = 30,
    answer: Annotated[int, typer.Option(help="Tokens of an answer.")] = 32,
    repeats: Annotated[int, typer.Option(help="Runs per rate; the median counts.")] = 7,
    dtypes: Annotated[str, typer.Option(help="Of the model.")] = "float32,bfloat16",
    quick: Annotated[bool, typer.Option(help="Very little of everything.")] = False,
) -> None:
    """Print the tables of docs/codecs.md."""
    if quick:
        windows, prompts, answer, repeats = 1, 2, 4, 1
    folder = prepare_model()
    tokenizer = AutoTokenizer.from_pretrained(folder)
    texts = [read_document(), *(path.read_text() for path in sorted(ROOT.glob("docs/**/*.md")))]
    ids = tokenizer("\n\n".join(texts), return_tensors="pt").input_ids[:, :40_000]
    results: dict[str, Any] = json.loads(RESULTS.read_text()) if RESULTS.exists() else {}
    results |= {"machine": machine(), "tokens": ids.shape[1]}
    print(f"{windows} windows of 1024 + 256 tokens; {prompts} prompts of 513, {answer} tokens each")
    for dtype in dtypes.split(","):
        with quiet_transformers(), torch.inference_mode():
            model = AutoModelForCausalLM.from_pretrained(folder, dtype=getattr(torch, dtype)).eval()
            sample = model(ids[:, : 4 * CHUNK], use_cache=True).past_key_values
            rates = measure_rates(chunks_of(sample, 4 * CHUNK), repeats)
            print(
                f"\n| {dtype} | size | encode | decode | two threads: encode | decode |\n"
                "|---|--:|--:|--:|--:|--:|"
            )
            for row in rates:
                print(
                    f"| {row['codec']} | {row['size']:.1%} | {row['encode']:.2f} GB/s "
                    f"| {row['decode']:.2f} GB/s | {row['encode2']:.2f} | {row['decode2']:.2f} |"
                )
            scores = perplexities(model, ids, windows=windows, prefix=1024, scored=256)
            same = agreement(model, ids, prompts=prompts, prefix=512, answer=answer)
        print(f"\n| {dtype} | perplexity | same answers | tokens until the first other |")
        print("|---|--:|--:|--:|")
        for name in CODEC_NAMES:
            whole, length = same[name]
            print(
                f"| {name} | {scores[name]:.4f} ({scores[name] / scores['raw'] - 1:+.2%}) "
                f"| {whole} of {prompts} | {length:.1f} of {answer} |",
                flush=True,
            )
        results[dtype] = {"rates": rates, "perplexity": scores, "same": same}
    if not quick:
        RESULTS.parent.mkdir(parents=True, exist_ok=True)
        RESULTS.write_text(json.dumps(results, indent=2) + "\n")


if __name__ == "__main__":
    typer.run(main)

#!/usr/bin/env python3
"""What vllm-long-prefill-share does, on vLLM 0.30.0's real schedulers with a simulated model.

    python3 benchmarks/long_prefill.py [--site-packages DIR] [--picture FILE.svg]

Eight streams decode, a prompt of 250,000 tokens comes (or two), and a short one every ten seconds.
The times of a step are modelled on a recipe's measurements (tests/support/scheduling.py); only the
schedulers' own cost, printed last, is measured. It needs torch for the CPU and what else vLLM's
engine imports: the environment that `bash .ci/run` makes, or GAUDI_FIX_PACK_ENGINE_PYTHON. With
--site-packages vLLM is taken from a folder in which the fix is applied; else it is laid out first.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from tests.support.scheduling import (  # noqa: E402
    DECODE_SECONDS,
    Engine,
    Setup,
    pristine_files,
    scheduler_classes,
)

RELEASE = "v0.30.0"
STREAMS = [f"stream {number}" for number in range(8)]
SHARES = (None, 0.25, 0.5, 0.75)  # None is the release's own scheduler
REQUESTS, ROUNDS, STEPS = 256, 60, 20


def main() -> None:
    """Run the simulations in the engine's environment, then show them."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--site-packages", type=Path, help="vLLM 0.30.0 with the fix applied")
    parser.add_argument("--picture", type=Path, default=ROOT / "build" / "long-prefill.svg")
    parser.add_argument("--child", type=Path, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.child:
        simulate_all(options.site_packages, options.child)
        return
    results = in_the_engine_environment(options.site_packages)
    show(results)
    options.picture.parent.mkdir(parents=True, exist_ok=True)
    options.picture.write_text(picture(results["speed"]), encoding="utf-8")
    print(f"\ntokens per second over time: {options.picture}")


def in_the_engine_environment(site: Path | None) -> Any:
    """What this program says as a child of the interpreter that has torch."""
    from tests.support.environments import NoInterpreter, interpreter
    from tests.support.trees import TreeError, Trees

    trees = Trees(ROOT)
    try:
        python = interpreter(frozenset({"torch"}), trees.cache)
        site = site or trees.fixed(RELEASE).path
    except (NoInterpreter, TreeError) as error:
        sys.exit(f"long_prefill.py: {error}")
    path = [site, ROOT / "tests" / "support" / "site", ROOT]
    environment = os.environ | {
        "PYTHONPATH": os.pathsep.join(map(str, path)),
        "PYTHONPYCACHEPREFIX": str(trees.bytecode),
        "VLLM_TARGET_DEVICE": "empty",
        "VLLM_PLUGINS": "",
        "VLLM_LOGGING_LEVEL": "ERROR",
        "VLLM_NO_USAGE_STATS": "1",
    }
    with tempfile.TemporaryDirectory(prefix="gaudi-fix-pack-") as folder:
        answer = Path(folder, "results.json")
        command = [python, __file__, "--site-packages", str(site), "--child", str(answer)]
        if code := subprocess.run(command, env=environment).returncode:
            sys.exit(f"long_prefill.py: the simulation ended with exit code {code}")
        return json.loads(answer.read_text(encoding="utf-8"))


# -- in the engine's environment -------------------------------------------------------------------


def simulate_all(site: Path, answer: Path) -> None:
    """All runs of the table, the two of the picture, and the schedulers' cost."""
    stock = scheduler_classes(pristine_files(site))
    runs, speed = [], {}
    for asynchronous in (False, True):
        for prompts in (1, 2):
            for share in SHARES:
                run, engine = simulate(answer.parent, asynchronous, prompts, share, stock)
                runs.append(run)
                if asynchronous and prompts == 1 and share in (None, 0.5):
                    speed["stock" if share is None else f"share {share}"] = speeds(engine)
    cost = {name: overhead(answer.parent, stock, name) for name in ("nobody", "one held")}
    answer.write_text(json.dumps({"runs": runs, "speed": speed, "cost": cost}), encoding="utf-8")


def simulate(
    folder: Path, asynchronous: bool, prompts: int, share: float | None, stock: Any
) -> tuple[dict[str, Any], Engine]:
    """One run: until all long prompts have their first tokens."""
    set_share(share)
    setup = Setup(asynchronous=asynchronous)
    engine = Engine(folder, setup, scheduler_class=stock[asynchronous] if share is None else None)
    for name in STREAMS:
        engine.add(name, 500, tokens=100_000)
    engine.run(lambda: len(engine.streams) == 8 and len(engine.streams[STREAMS[0]].tokens) >= 50)
    begin = engine.now
    long = [f"long {number}" for number in range(prompts)]
    for name in long:
        engine.add(name, 250_000, tokens=1)
    for number in range(1, 60):
        engine.add(f"short {number}", 600, tokens=5, at=begin + 10 * number)
    engine.run(lambda: all(name in engine.streams and engine.streams[name].times for name in long))
    end = engine.now
    chunks = [step for step in engine.steps if any(step.chunk_of(name) for name in long)]
    names = (f"short {number}" for number in range(1, 60))
    waits = [
        (stream.times[0] if stream.times else end) - stream.arrival
        for stream in (engine.streams[name] for name in names if name in engine.streams)
        if stream.arrival < end - 2
    ]
    run = {
        "mode": "async" if asynchronous else "sync",
        "prompts": prompts,
        "share": share,
        "speed": statistics.mean(engine.streams[name].rate(begin, end) for name in STREAMS),
        "ttft": [engine.streams[name].ttft for name in long],
        "had": sum(step.seconds for step in chunks) / (end - begin),
        "short": [statistics.median(waits), max(waits)],
    }
    return run, engine


def set_share(share: float | None, min_tokens: int = 32768) -> None:
    """The environment of the next scheduler."""
    os.environ["VLLM_LONG_PREFILL_SHARE"] = str(share or 1)
    os.environ["VLLM_LONG_PREFILL_MIN_TOKENS"] = str(min_tokens)
    os.environ["VLLM_LONG_PREFILL_SHARE_ASYNC"] = "1"


def speeds(engine: Engine) -> list[float]:
    """A stream's tokens in each second, from five seconds before the long prompt to its end."""
    begin = engine.streams["long 0"].arrival - 5
    seconds = round(engine.now - begin)
    rates = [engine.streams[STREAMS[0]].rate(begin + i, begin + i + 1) for i in range(seconds)]
    # What comes after is the speed of before.
    return rates + [1 / DECODE_SECONDS] * 5


def overhead(folder: Path, stock: Any, long_prompts: str) -> list[float]:
    """CPU seconds of a step in the scheduler, stock and fixed, measured in turn.

    256 requests decode. With "one held" the fixed scheduler has a long prompt as well, which sits
    out each of these steps.
    """
    held = long_prompts == "one held"
    set_share(1e-6 if held else 0.5, 1000)
    engines = [many(folder, stock[1]), many(folder, None, held)]
    sides = [(engine, timed(engine.scheduler)) for engine in engines]
    seconds: tuple[list[float], list[float]] = ([], [])
    for round_ in range(ROUNDS):
        for side in (0, 1) if round_ % 2 else (1, 0):
            engine, spent = sides[side]
            spent.clear()
            for _ in range(STEPS):
                engine.step()
                assert len(engine.steps[-1].work) == REQUESTS
            seconds[side].append(sum(spent) / STEPS)
    ratios = [fixed / stock for stock, fixed in zip(*seconds, strict=True)]
    return [*map(statistics.median, seconds), statistics.median(ratios)]


def many(folder: Path, scheduler_class: Any, held: bool = False) -> Engine:
    """An engine in which so many requests decode; a long prompt may have had its first chunk."""
    setup = Setup(asynchronous=True, blocks=20_000, block_size=128, sequences=300)
    engine = Engine(folder, setup, scheduler_class=scheduler_class)
    for number in range(REQUESTS):
        engine.add(f"request {number}", 100, tokens=100_000)
    streams = engine.streams
    engine.run(lambda: len(streams) == REQUESTS and all(s.tokens for s in streams.values()))
    if held:
        engine.add("long", 100_000, tokens=1)
        engine.run(lambda: engine.steps[-1].chunk_of("long") > 0)
        engine.step()
    return engine


def timed(scheduler: Any) -> list[float]:
    """CPU seconds of each call of a scheduler from now on."""
    spent: list[float] = []

    def around(method: Callable[..., Any]) -> Callable[..., Any]:
        def call(*arguments: Any) -> Any:
            begin = time.thread_time()
            result = method(*arguments)
            spent.append(time.thread_time() - begin)
            return result

        return call

    scheduler.schedule = around(scheduler.schedule)
    scheduler.update_from_output = around(scheduler.update_from_output)
    return spent


# -- what is shown ---------------------------------------------------------------------------------


def show(results: Any) -> None:
    """The table and the cost."""
    print(
        "| scheduling | long prompts | share | decode tokens/s per stream | TTFT of the long |",
        end="",
    )
    print(" its share of the time | TTFT of short: median, worst |")
    print("| --- | --- | --- | --- | --- | --- | --- |")
    for run in results["runs"]:
        share = "stock" if run["share"] is None else run["share"]
        ttft = ", ".join(f"{seconds:.1f} s" for seconds in run["ttft"])
        median, worst = run["short"]
        print(
            f"| {run['mode']} | {run['prompts']} | {share} | {run['speed']:.2f} | {ttft}"
            f" | {run['had']:.3f} | {median:.2f} s, {worst:.2f} s |"
        )
    print(f"\nalone a stream has {1 / DECODE_SECONDS:.2f} tokens/s\n")
    for name, (stock, fixed, ratio) in results["cost"].items():
        print(
            f"scheduler, {REQUESTS} requests decoding, long prompts: {name}: stock"
            f" {stock * 1e3:.3f} ms a step, fixed {fixed * 1e3:.3f} ms, ratio {ratio:.3f}"
        )


def picture(speed: dict[str, list[float]]) -> str:
    """Tokens a second of one stream over time, as SVG."""
    width, height, left, top = 760, 260, 50, 30
    longest = max(len(rates) for rates in speed.values())
    most = max(max(rates) for rates in speed.values()) * 1.1

    def place(second: float, rate: float) -> str:
        return f"{left + second / longest * width:.1f},{top + height - rate / most * height:.1f}"

    def lines() -> Iterator[str]:
        yield (
            f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width + 80} {height + 80}"'
            ' font-family="sans-serif" font-size="12">'
        )
        yield '<rect width="100%" height="100%" fill="white"/>'
        title = "tokens/s of a stream; a prompt of 250,000 tokens comes at 5 s"
        yield f'<text x="{left}" y="18">{title}</text>'
        for rate in range(0, int(most) + 1, 4):
            x, y = place(0, rate).split(",")
            yield f'<text x="{left - 8}" y="{y}" text-anchor="end">{rate}</text>'
            yield f'<path d="M{x},{y} h{width}" stroke="#ddd"/>'
        for second in range(0, longest + 1, 20):
            x, y = place(second, 0).split(",")
            yield f'<text x="{x}" y="{float(y) + 18}" text-anchor="middle">{second} s</text>'
        for number, (name, rates) in enumerate(speed.items()):
            color = ("#c0392b", "#2471a3")[number % 2]
            points = " ".join(place(i + 0.5, rate) for i, rate in enumerate(rates))
            yield f'<polyline points="{points}" fill="none" stroke="{color}" stroke-width="1.5"/>'
            corner = f'x="{left + 160 * number}" y="{top + height + 42}"'
            yield f'<text {corner} fill="{color}">{name}</text>'
        yield "</svg>"

    return "\n".join(lines()) + "\n"


if __name__ == "__main__":
    main()

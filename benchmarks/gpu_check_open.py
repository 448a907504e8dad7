"""The open step against plain passes in float32 on the CPU: captures, edits, swaps, functions of logits, and states.

gpu_check_open.py SETTINGS_JSON, for gpu_checks.py. For each model, dtype and compile mode one row a case. What the
engine drew and captured is compared with `score` of the same tokens by the same weights, edits and layers on the CPU:
no cache, block, batch, graph or kernel takes part there. An activation's error is the length of its difference over the
length of the right one (or over the site's usual length, where that is more); a row states its bound. `traced` and
`captured` count what a case built, `built_again` what it built the second time, with other values: nothing.
"""

import json
import math
import random
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from gpu_check_parts import USUAL_SPREAD, emit
from provenance import random_params
from soak_reference import TOLERANCE, reference_of

import fnllm
from fnllm.compiled import graphs_traced
from fnllm.sampler import child_seed, gumbel_noise

ROOT = Path(__file__).parents[1]
sys.path += [str(ROOT / "tests"), str(ROOT / "tests" / "distributed")]

import checks_open  # noqa: E402  found by the line above
from checks_open import EVERYWHERE, SWAPS, edits_of  # noqa: E402

MODELS = ("qwen3-odd", "qwen2-window", "qwen3-moe-mixed", "random")  # the last has a head dim that all kernels take
BOUND = {torch.float32: 1e-3, torch.bfloat16: 0.06}  # of an activation's error
TIPPING = 0.9  # share that must be within its bound where a rounding may tip a choice: routers, top-k, in bfloat16
SIZES = dict(num_blocks=64, block_size=16, max_num_seqs=4, max_model_len=64, max_chunk=8)
GREEDY = fnllm.Sampling(temperature=0, max_tokens=8, ignore_eos=True, logprobs=0)
DRAWN = replace(GREEDY, temperature=1.0, seed=5)
SHARED = [random.Random(0).randrange(3, 100) for _ in range(17)]
PROMPTS = [[*SHARED, 33, 7, 8, 9], [8, 9, 79], [*SHARED, 41, 5, 6, 2], [31, 41, 59, 26, 53]]


def opened(s: SimpleNamespace) -> None:
    """All modes of this process's share of models and dtypes."""
    torch.backends.cuda.matmul.allow_tf32 = torch.backends.cudnn.allow_tf32 = False
    units = [(name, dtype) for name in MODELS for dtype in ("float32", "bfloat16")]
    for name, dtype in units[s.job :: s.jobs]:
        if name == "random":
            params = random_params(s.size, dtype=dtype, device=s.device, lively=True)
        else:
            params = fnllm.load(Path(s.oracle) / name, dtype=dtype, device=s.device)
        for mode in s.modes.split(","):
            if s.device == "cpu" and mode in ("graphs", "reduce-overhead"):
                continue
            here = dict(part="open", model=name, dtype=dtype, mode=mode)
            for case in (captures_and_edits, alone, swaps, functions_of_logits, states):
                began = time.perf_counter()
                for row in case(params, dict(SIZES, compile=mode)):
                    emit(s, **here, **row, seconds=round(time.perf_counter() - began, 1))
                    began = time.perf_counter()


def built(params: fnllm.Params, options: dict) -> tuple[int, dict[int, Any]]:
    """How many graphs torch.compile has traced so far, and the CUDA graphs that the machine has."""
    runners = fnllm.engine(params, **options).machine.runners.values()
    return graphs_traced(), {id(one): one for runner in runners for one in runner.graphs.values()}


def since(before: tuple, after: tuple) -> tuple[int, int]:
    """Graphs traced and captured between two looks."""
    return after[0] - before[0], len(after[1].keys() - before[1].keys())


def twice(params: fnllm.Params, options: dict, first: Callable[[], Any], second: Callable[[], Any]) -> tuple:
    """What both calls give, and what each built."""
    start = built(params, options)
    one, between = first(), built(params, options)
    two, end = second(), built(params, options)
    traced, captured = since(start, between)
    return one, two, dict(traced=traced, captured=captured, built_again=sum(since(between, end)))


def captures_and_edits(params: fnllm.Params, options: dict) -> Iterator[dict]:
    """A mixed batch in chunks, every request with edits and captures of its own, and again with other values."""
    edits = [tuple(some or ()) for some in edits_of(params.config)]
    stronger = [tuple(doubled(edit) for edit in some) for some in edits]
    looked = [EVERYWHERE, fnllm.Capture(("layers.0.k", "layers.1.v", "logits"), "output"), None, EVERYWHERE]

    def call(chosen: list) -> Callable[[], list]:
        return lambda: fnllm.generate(params, PROMPTS, GREEDY, edits=chosen, capture=looked, progress=False, **options)

    first, second, counts = twice(params, options, call(edits), call(stronger))
    found = [compared(params, PROMPTS, *pair) for pair in ((first, edits), (second, stronger))]
    changed = first[0].captured["layers.1.resid_post"] - second[0].captured["layers.1.resid_post"]
    yield verdict("captures and edits", params, found, counts, float(changed.abs().max()) > 0.1)


def alone(params: fnllm.Params, options: dict) -> Iterator[dict]:
    """One request, whose decode steps have kernels of their own: as it is, and looked into at one layer of several."""
    edits = [(fnllm.steer("layers.1.resid_post", checks_open.vector(params.config.hidden_size, 1), 0.5),)]
    for case, chosen, capture in (("alone", [()], None), ("alone, one layer seen", edits, "layers.1.*")):

        def call(chosen: list = chosen, capture: Any = capture) -> list:
            return fnllm.generate(params, PROMPTS[:1], GREEDY, edits=chosen, capture=capture, progress=False, **options)

        first, second, counts = twice(params, options, call, call)
        found = [compared(params, PROMPTS[:1], outs, chosen) for outs in (first, second)]
        yield verdict(case, params, found, counts, True)


def swaps(params: fnllm.Params, options: dict) -> Iterator[dict]:
    """Every swap of examples/swap_layers.py, each twice; between and behind them the plain layers are as before."""
    usual = fnllm.Layers()

    def tokens(of: fnllm.Params, layers: fnllm.Layers, sampling: fnllm.Sampling) -> Callable[[], list]:
        return lambda: fnllm.generate(of, PROMPTS, sampling, layers=layers, progress=False, **options)

    before = tokens(params, usual, GREEDY)()
    for name, layers in SWAPS.SWAPS.items():
        sampling, meant = (DRAWN, usual) if layers.sample is not usual.sample else (GREEDY, layers)
        call = tokens(params, layers, sampling)
        first, second, counts = twice(params, options, call, call)
        found = [compared(params, PROMPTS, outs, [()] * 4, meant, sampling) for outs in (first, second)]
        # Nothing that others left in the prefix cache is found at first, what the swap left itself is later.
        own = first[0].cached_tokens == 0 and second[0].cached_tokens == 16
        changed = [out.logprobs for out in first] != [out.logprobs for out in before]
        yield verdict(name, params, found, counts, own and changed, tips="top-k" in name)
    quantised, layers = SWAPS.quantised(params), usual._replace(linear=SWAPS.int8_linear)
    call = tokens(quantised, layers, GREEDY)
    first, second, counts = twice(quantised, dict(options, layers=layers), call, call)
    found = [compared(dequantised(quantised), PROMPTS, outs, [()] * 4) for outs in (first, second)]
    yield verdict("8-bit weights", params, found, counts, True)
    mark, after = built(params, options), tokens(params, usual, GREEDY)()
    same = [out.token_ids for out in before] == [out.token_ids for out in after]
    again = sum(since(mark, built(params, options)))
    found = [compared(params, PROMPTS, outs, [()] * 4) for outs in (before, after)]
    yield verdict("plain before and after", params, found, dict(built_again=again), same or routed(params))


def leaning(logits: torch.Tensor, history: Any) -> torch.Tensor:
    """A `logits_fn`: some ids gain, others lose."""
    return logits + torch.arange(logits.shape[1], device=logits.device).float().sin()


def unrepeated(logits: torch.Tensor, history: Any) -> torch.Tensor:
    """A `logits_fn`: no token comes twice, the prompt's included."""
    known = torch.arange(history.tokens.shape[1], device=logits.device) < history.lengths[:, None]
    ids = torch.where(known, history.tokens, logits.shape[1]).long()
    return torch.cat([logits, logits[:, :1]], 1).scatter(1, ids, -torch.inf)[:, :-1]


def functions_of_logits(params: fnllm.Params, options: dict) -> Iterator[dict]:
    """A batch whose requests have a `logits_fn` each, which may look at the tokens so far, or none."""
    functions = (leaning, None, unrepeated, leaning)
    sampling = [replace(GREEDY, logits_fn=function) for function in functions]

    def call() -> list:
        return fnllm.generate(params, PROMPTS, sampling, progress=False, **options)

    first, second, counts = twice(params, options, call, call)
    meant = tuple(meant_logits if function is None else WRITTEN_ANEW[function] for function in functions)
    found = [compared(params, PROMPTS, outs, [()] * 4, meant=meant) for outs in (first, second)]
    plain = fnllm.generate(params, PROMPTS, GREEDY, progress=False, **options)
    changed = all(
        (one.token_ids != other.token_ids) == (function is not None)
        for function, one, other in zip(functions, first, plain, strict=True)
    )
    yield verdict("functions of logits", params, found, counts, changed or routed(params))


def meant_logits(logits: torch.Tensor, sequence: Sequence[int], first: int) -> torch.Tensor:
    """Logits of the tokens from `first` on as the draw sees them: as they are."""
    return logits


def meant_by_leaning(logits: torch.Tensor, sequence: Sequence[int], first: int) -> torch.Tensor:
    return logits + torch.tensor([math.sin(index) for index in range(logits.shape[1])])


def meant_by_unrepeated(logits: torch.Tensor, sequence: Sequence[int], first: int) -> torch.Tensor:
    forbidden = logits.clone()
    for row in range(len(logits)):
        forbidden[row, list(sequence[: first + row])] = -math.inf
    return forbidden


WRITTEN_ANEW = {leaning: meant_by_leaning, unrepeated: meant_by_unrepeated}


def states(params: fnllm.Params, options: dict) -> Iterator[dict]:
    """Forks, cuts, appends and replays of a log: in float32 the tokens and block tables of the CPU's eager engine."""
    if params.tree["norm"].dtype != torch.float32:
        return
    found = checks_open.states(params, compile=options["compile"])
    expected = checks_open.states(reference_of(params))
    yield dict(case="states", ok=found == expected)


def doubled(edit: fnllm.Edit) -> fnllm.Edit:
    """The edit with other values of the same shapes."""
    return replace(edit, values=tuple(2 * x if x.is_floating_point() else x for x in edit.values))


def dequantised(params: fnllm.Params) -> fnllm.Params:
    """The model that the 8-bit weights mean, in float32 on the CPU, for the usual layers."""

    def whole(p: Any) -> Any:
        return p.values.cpu().float() * p.scale.cpu().float()[:, None] if isinstance(p, SWAPS.Int8) else p

    layers = [{name: whole(p) for name, p in layer.items()} for layer in params.tree["layers"]]
    return params._replace(tree={**params.tree, "layers": layers}, workspace={})


def routed(params: fnllm.Params) -> bool:
    """Whether a rounding may be a jump, since it may tip a router's choice."""
    return params.config.num_experts > 0 and params.tree["norm"].dtype == torch.bfloat16


def compared(
    params: fnllm.Params, prompts: Sequence, outs: Sequence, edits: Sequence, layers: fnllm.Layers | None = None,
    sampling: fnllm.Sampling = GREEDY, meant: Sequence[Callable] | None = None,
) -> dict[str, Any]:  # fmt: skip
    """How far completions are from plain passes: errors of activations and log-probabilities, and what tokens lack.

    `meant` has a function for each prompt, of the logits that its draws see.
    """
    dtype, reference = params.tree["norm"].dtype, reference_of(params)
    sequences = [[*prompt, *out.token_ids] for prompt, out in zip(prompts, outs, strict=True)]
    scored = fnllm.score(reference, sequences, edits=edits, layers=layers, capture=EVERYWHERE)
    spread = torch.cat([one.captured["logits"] for one in scored]).std().item()
    slack = 2 * TOLERANCE[dtype] * max(1, spread / USUAL_SPREAD)
    errors, logprobs, behind = [torch.zeros(0)], [], []
    meant = [meant_logits] * len(prompts) if meant is None else meant
    for prompt, out, one, seen in zip(prompts, outs, scored, meant, strict=True):
        at = torch.tensor(out.captured_at, dtype=torch.int64)
        for site, x in out.captured.items():
            right = one.captured[site][at].flatten(1)
            length = right.norm(dim=1)
            errors.append((x.cpu().float().flatten(1) - right).norm(dim=1) / length.clamp(min=length.mean().item()))
        logits = one.captured["logits"][len(prompt) - 1 : -1]
        drawable = seen(logits, [*prompt, *out.token_ids], len(prompt))
        behind.append(lacking(drawable, out.token_ids, len(prompt), sampling, slack))
        said = torch.tensor([entry.logprob for entry in out.logprobs])
        logprobs.append((said - meant_logprobs(logits, out.token_ids, sampling)).abs())
    return dict(errors=torch.cat(errors), logprobs=torch.cat(logprobs), behind=torch.cat(behind), slack=slack)


def meant_logprobs(logits: torch.Tensor, tokens: Sequence[int], sampling: fnllm.Sampling) -> torch.Tensor:
    """The tokens' log-probabilities; for the example's sampler, which draws, among what lies above the mean."""
    if sampling.temperature > 0:
        logits = torch.where(logits >= logits.mean(-1, keepdim=True), logits, -torch.inf)
    return logits.log_softmax(-1).gather(1, torch.tensor(tokens)[:, None])[:, 0]


def lacking(
    logits: torch.Tensor, tokens: Sequence[int], first: int, sampling: fnllm.Sampling, slack: float
) -> torch.Tensor:
    """By how much each token is behind the one to draw; drawn ones by the example's sampler, above the mean alone."""
    chosen = torch.tensor(tokens)[:, None]
    if sampling.temperature == 0:
        return logits.amax(-1) - logits.gather(1, chosen)[:, 0]
    places = first + torch.arange(len(tokens))
    seeds = torch.full_like(places, child_seed(sampling.seed, 0))
    score = logits + sampling.temperature * gumbel_noise(seeds, places, torch.arange(logits.shape[1]))
    high = logits - logits.mean(-1, keepdim=True)
    score = torch.where(high >= -slack, score, -torch.inf)
    return score.masked_fill(high < slack, -torch.inf).amax(-1) - score.gather(1, chosen)[:, 0]


def verdict(
    case: str, params: fnllm.Params, found: Sequence[dict], counts: dict, also: bool, tips: bool = False
) -> dict[str, Any]:
    """The row of a case: its largest errors beside their bounds."""
    dtype = params.tree["norm"].dtype
    errors, logprobs, behind = (torch.cat([one[key] for one in found]) for key in ("errors", "logprobs", "behind"))
    bound, slack = BOUND[dtype], found[0]["slack"]
    tips = routed(params) or (tips and dtype == torch.bfloat16)
    pairs = ((errors, bound), (logprobs, slack), (behind, slack))
    share = min(float((x <= limit).float().mean()) for x, limit in pairs if len(x))
    worst = [float(f"{x.max().item():.2g}") if len(x) else None for x, _ in pairs]
    return dict(
        case=case, activations=len(errors), worst_activation=worst[0], bound=bound, tokens=len(behind),
        worst_logprob=worst[1], worst_behind=worst[2], slack=round(slack, 4), share_within=round(share, 4),
        required=TIPPING if tips else 1.0, as_expected=also, **counts,
        ok=share >= (TIPPING if tips else 1.0) and also and counts["built_again"] == 0,
    )  # fmt: skip


if __name__ == "__main__":
    settings = SimpleNamespace(**json.loads(sys.argv[1]))
    torch.set_num_threads(1 if settings.device == "cpu" else torch.get_num_threads())
    with torch.no_grad():
        opened(settings)

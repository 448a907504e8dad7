"""Rotary embeddings against transformers: frequencies, tables, rotation, in every scaling."""

from dataclasses import replace

import numpy as np
import pytest
import torch
from transformers import LlamaConfig
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding, apply_rotary_pos_emb

import fnllm
from fnllm.rope import apply_rope, longest_shared, make_rope, rope_tables
from fnllm_weights import ModelConfig, Params, RopeConfig
from fnllm_weights.init import init
from fnllm_weights.params import walk

SIZES = {
    "hidden_size": 96, "num_attention_heads": 4, "num_key_value_heads": 2, "num_hidden_layers": 1, "vocab_size": 9,
    "intermediate_size": 8, "max_position_embeddings": 128,
}  # fmt: skip
YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32}
LLAMA3 = {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
LONGROPE = {"rope_type": "longrope", "original_max_position_embeddings": 32}
SHORT, LONG = [1 + 0.01 * i for i in range(12)], [1 + 0.7 * i for i in range(12)]
SCALINGS = {
    "default": {"rope_type": "default"},
    "linear": {"rope_type": "linear", "factor": 3.7},
    "dynamic": {"rope_type": "dynamic", "factor": 2.3},
    "yarn": YARN,
    "yarn-attention-factor": {**YARN, "attention_factor": 1.0},
    "yarn-mscale": {**YARN, "factor": 40.0, "mscale": 0.707, "mscale_all_dim": 1.3},
    "yarn-mscale-alone": {**YARN, "mscale": 0.707},
    "yarn-betas": {**YARN, "beta_fast": 20.0, "beta_slow": 2.0, "truncate": False},
    "yarn-ramp-past-the-end": {**YARN, "original_max_position_embeddings": 600},  # with a base of 10
    "yarn-shrunk": {**YARN, "factor": 1.0},
    "yarn-without-factor": {**YARN, "factor": None},
    "llama3": {**LLAMA3, "original_max_position_embeddings": 32},
    "longrope": {**LONGROPE, "short_factor": SHORT, "long_factor": LONG},
    "longrope-factor": {**LONGROPE, "short_factor": SHORT, "long_factor": LONG, "factor": 8.0},
    "longrope-attention": {**LONGROPE, "short_factor": SHORT, "long_factor": LONG, "attention_factor": 1.3},
}


def ours(scaling: dict, theta: float = 5e5, **sizes) -> ModelConfig:
    fields = {**SIZES, **sizes, "architectures": ["LlamaForCausalLM"], "rope_theta": theta, "rope_scaling": scaling}
    return ModelConfig.from_dict(fields)


def theirs(scaling: dict, theta: float = 5e5, **sizes) -> LlamaRotaryEmbedding:
    return LlamaRotaryEmbedding(LlamaConfig(**{**SIZES, **sizes}, rope_parameters={"rope_theta": theta, **scaling}))


@pytest.mark.parametrize("name", SCALINGS)
@pytest.mark.parametrize("length", [1, 31, 32, 33, 128, 129, 400])
def test_tables_equal_transformers(name, length):
    """At every length around the original one and the configured one, past both included."""
    positions = torch.arange(length)
    their_cos, their_sin = theirs(SCALINGS[name])(torch.zeros(1), positions[None])
    cos, sin = rope_tables(make_rope(ours(SCALINGS[name])), positions, torch.full((length,), length))
    assert cos.shape == sin.shape == (length, 12) and cos.dtype == torch.float32
    torch.testing.assert_close(cos, their_cos[0, :, :12], rtol=0, atol=1e-6)
    torch.testing.assert_close(sin, their_sin[0, :, :12], rtol=0, atol=1e-6)


@pytest.mark.parametrize("name", SCALINGS)
@pytest.mark.parametrize(("head_dim", "theta"), [(24, 1e4), (24, 10.0), (10, 1e6), (128, 1e6)])
def test_frequencies_equal_bit_for_bit(name, head_dim, theta):
    scaling = dict(SCALINGS[name])
    for factor in {"short_factor", "long_factor"} & scaling.keys():
        scaling[factor] = [scaling[factor][i % 12] for i in range(head_dim // 2)]
    rope, reference = make_rope(ours(scaling, theta, head_dim=head_dim)), theirs(scaling, theta, head_dim=head_dim)
    assert torch.equal(rope.inv_freq, reference.inv_freq)
    assert rope.attention_factor.item() == torch.tensor(reference.attention_scaling).item()


def test_fault_53_no_scaling_in_all_spellings():
    expected = make_rope(ours(None))
    for rope in ({"rope_theta": 5e5}, {"rope_parameters": {"rope_type": "default", "rope_theta": 5e5}}):
        found = make_rope(ModelConfig.from_dict({**SIZES, "architectures": ["LlamaForCausalLM"], **rope}))
        assert torch.equal(found.inv_freq, expected.inv_freq) and found.attention_factor == 1


def test_fault_54_yarn_scales_the_tables_by_its_attention_factor():
    """0.1 ln(4) + 1 unless the config says otherwise, at position 0 too."""
    zero, one = torch.zeros(1, dtype=torch.long), torch.ones(1, dtype=torch.long)
    for scaling, expected in ((YARN, 1.1386294361), ({**YARN, "attention_factor": 1.0}, 1.0)):
        cos, sin = rope_tables(make_rope(ours(scaling)), zero, one)
        assert cos[0, 0].item() == pytest.approx(expected, abs=1e-6) and sin[0, 0] == 0


@pytest.mark.parametrize("name", ["linear", "llama3"])
def test_fault_56_the_scaling_is_applied(name):
    positions = torch.arange(3 * 128)
    scaled = rope_tables(make_rope(ours(SCALINGS[name])), positions, positions + 1)[0]
    plain = rope_tables(make_rope(ours(None)), positions, positions + 1)[0]
    assert (scaled - plain).abs().max() > 0.5


@pytest.mark.parametrize("name", ["dynamic", "longrope"])
def test_sequences_of_one_batch_each_have_their_own_length(name):
    rope = make_rope(ours(SCALINGS[name]))
    lengths = [5, 400, 130]
    alone = [rope_tables(rope, torch.arange(n), torch.full((n,), n)) for n in lengths]
    together = rope_tables(
        rope, torch.cat([torch.arange(n) for n in lengths]), torch.cat([torch.full((n,), n) for n in lengths])
    )
    for side in range(2):
        torch.testing.assert_close(together[side], torch.cat([a[side] for a in alone]), rtol=0, atol=1e-6)


def toy(name):
    """A model whose keys have other angles beyond 16 tokens, and its random weights."""
    sizes = {"vocab_size": 41, "hidden_size": 32, "num_attention_heads": 4}
    sizes["max_position_embeddings"] = 16 if name == "dynamic" else 64
    scaling = {**SCALINGS[name], "original_max_position_embeddings": 16, "factor": 4.0}
    if name == "longrope":
        scaling |= {"short_factor": [1.0] * 4, "long_factor": [4.0, 3.0, 5.0, 6.0]}
    config = ours(scaling, theta=1e4, **sizes)
    tree = init(config, seed=3, dtype="float32")
    for path, leaf in walk(tree):
        leaf.mul_(1 if "norm" in str(path[-1]) else 12)
    return config, tree


@pytest.mark.parametrize("name", ["dynamic", "longrope"])
def test_a_prompts_text_does_not_depend_on_shorter_and_longer_ones_that_begin_alike(name):
    config, tree = toy(name)
    long = [(7 * i + 3) % 41 for i in range(32)]
    settings = fnllm.Sampling(temperature=0, max_tokens=8, ignore_eos=True, logprobs=0)

    options = {"max_model_len": 48, "block_size": 4, "num_blocks": 40}

    def texts(*prompts):
        params = Params(config, None, tree, workspace={})
        done = [fnllm.generate(params, one, settings, **options) for one in prompts]
        return [(one.token_ids, [token.logprob for token in one.logprobs]) for (one,) in done]

    assert longest_shared(config) == 16
    (alone,), (shorter,) = texts(long), texts(long[:12])
    assert texts(long[:12], long)[1] == alone
    assert texts(long, long[:12])[1] == shorter
    worker = fnllm.engine(Params(config, None, tree), **options)
    state, grown = fnllm.add(worker.init(), worker.request(long[:12], replace(settings, max_tokens=0)))
    state, _ = worker.step(state)
    state, step = worker.step(fnllm.append(state, grown, long[12:], max_tokens=8))
    while step is not None:
        state, step = worker.step(state)
    assert fnllm.tokens(state, grown)[32:] == alone[0]


MOVES = {
    "append past it": (12, 2, lambda s, i: fnllm.append(s, i, range(20), max_tokens=4)),
    "append beyond it": (20, 2, lambda s, i: fnllm.append(s, i, range(9), max_tokens=4)),
    "grow past it, append": (14, 5, lambda s, i: fnllm.append(s, i, [1, 2], max_tokens=4)),
    "grow past it, go on": (14, 5, lambda s, i: fnllm.append(s, i, max_tokens=4)),
    "truncate before it": (30, 2, lambda s, i: fnllm.truncate(s, i, 11)),
    "truncate beyond it": (30, 2, lambda s, i: fnllm.truncate(s, i, 19)),
}


@pytest.mark.parametrize("move", MOVES)
@pytest.mark.parametrize("name", ["dynamic", "longrope"])
def test_a_sequence_of_another_length_goes_on_as_a_prompt_of_its_tokens(name, move):
    """Its keys so far have the angles of a shorter or longer prompt; a fork keeps its own."""
    config, tree = toy(name)
    length, steps, change = MOVES[move]
    settings = fnllm.Sampling(temperature=0, max_tokens=12, ignore_eos=True, logprobs=0)

    def begin(prompt):
        """An engine of its own, so that no block is lost to others, with a sequence of the prompt."""
        worker = fnllm.engine(Params(config, None, tree), max_model_len=48, block_size=4, num_blocks=60)
        return worker, *fnllm.add(worker.init(), worker.request(prompt, settings))

    def run(worker, state, seq_id, count=None):
        """A sequence's first `count` tokens, and the log-probabilities of those that it draws of them."""
        found, known = [], len(fnllm.tokens(state, seq_id))
        state, step = worker.step(state)
        while step is not None:
            entry = np.flatnonzero((step.plan.seq_ids == seq_id) & step.plan.samples)
            found += step.results.logprob[entry].tolist()
            state, step = worker.step(state)
        return fnllm.tokens(state, seq_id)[:count], found[: None if count is None else count - known]

    def forked():
        worker, state, one = begin([(7 * i + 3) % 41 for i in range(length)])
        for _ in range(steps):
            state, _ = worker.step(state)
        return worker, *fnllm.fork(state, one), one

    worker, state, other, one = forked()
    state = change(state, one)
    tokens, logprobs = run(worker, state, one)
    expected = run(*begin(fnllm.tokens(state, one)), len(tokens))
    assert tokens == expected[0] and logprobs == pytest.approx(expected[1], abs=1e-4)

    worker, state, other, one = forked()
    tokens, logprobs = run(worker, change(state, one), other)
    expected = run(*forked()[:3])
    assert tokens == expected[0] and logprobs == pytest.approx(expected[1], abs=1e-4)


@pytest.mark.parametrize("name", ["dynamic", "longrope"])
def test_keys_whose_angles_stay_are_not_computed_again(name):
    config, tree = toy(name)
    settings = fnllm.Sampling(temperature=0, max_tokens=12, ignore_eos=True)
    worker = fnllm.engine(Params(config, None, tree), max_model_len=48, block_size=4, num_blocks=60)

    def computed(length, *tokens):
        """Tokens of the step behind an append to a sequence that has run two steps."""
        state, one = fnllm.add(worker.init(), worker.request([1] * length, settings))
        for _ in range(2):
            state, _ = worker.step(state)
        return worker.step(fnllm.append(state, one, tokens))[1].plan.query_lens.tolist()

    assert computed(8, 5, 6, 7) == [4]
    assert computed(20, 5, 6, 7) == [4 if name == "longrope" else 25]


def test_other_scalings_do_not_look_at_the_length():
    positions = torch.arange(50)
    for scaling in SCALINGS.values():
        looks = scaling["rope_type"] in ("dynamic", "longrope")
        assert (longest_shared(ours(scaling)) is not None) == looks
        if not looks:
            rope = make_rope(ours(scaling))
            short, long = (rope_tables(rope, positions, torch.full((50,), n))[0] for n in (50, 5000))
            assert torch.equal(short, long)


def test_int32_positions_give_the_same_tables():
    for scaling in SCALINGS.values():
        rope, positions = make_rope(ours(scaling)), torch.arange(200)
        wide = rope_tables(rope, positions, positions + 1)
        narrow = rope_tables(rope, positions.int(), positions.int() + 1)
        assert torch.equal(wide[0], narrow[0]) and torch.equal(wide[1], narrow[1])


def test_rotation_equals_transformers():
    generator = torch.Generator().manual_seed(0)
    q, k = torch.randn(5, 3, 24, generator=generator), torch.randn(5, 2, 24, generator=generator)
    positions = torch.tensor([0, 7, 3, 90, 127])
    cos, sin = rope_tables(make_rope(ours(None)), positions, positions + 1)
    their_cos, their_sin = theirs({"rope_type": "default"})(q, positions[None])
    expected = apply_rotary_pos_emb(q.transpose(0, 1)[None], k.transpose(0, 1)[None], their_cos, their_sin)
    before = q.clone()
    assert torch.equal(apply_rope(q, cos, sin), expected[0][0].transpose(0, 1))
    assert torch.equal(apply_rope(k, cos, sin), expected[1][0].transpose(0, 1))
    assert torch.equal(q, before)


def test_rotation_in_bfloat16_is_rounded_once():
    x = torch.randn(4, 2, 24, generator=torch.Generator().manual_seed(0)).bfloat16()
    cos, sin = rope_tables(make_rope(ours(None)), torch.arange(4), torch.arange(4) + 1)
    assert torch.equal(apply_rope(x, cos, sin), apply_rope(x.float(), cos, sin).bfloat16())


def test_the_default_dtype_of_the_process_does_not_matter():
    expected = [make_rope(ours(scaling)) for scaling in SCALINGS.values()]
    torch.set_default_dtype(torch.float64)
    try:
        found = [make_rope(ours(scaling)) for scaling in SCALINGS.values()]
    finally:
        torch.set_default_dtype(torch.float32)
    for one, other in zip(found, expected, strict=True):
        for a, b in zip(one, other, strict=True):
            assert (a is None and b is None) or (a.dtype == b.dtype and torch.equal(a, b))


def test_a_scaling_written_by_hand_without_its_numbers_says_which():
    config = ours(None)
    for kind, name in (("yarn", "factor"), ("longrope", "short_factor"), ("linear", "factor")):
        broken = ModelConfig(**{**vars(config), "rope": RopeConfig(rope_type=kind)})
        with pytest.raises(ValueError, match=f"rope scaling '{kind}' needs {name}"):
            make_rope(broken)


@pytest.mark.compiled
@pytest.mark.parametrize("name", ["yarn", "dynamic", "longrope"])
def test_tables_compile_whole_for_any_number_of_tokens(name):
    rope = make_rope(ours(SCALINGS[name]))
    compiled = torch.compile(rope_tables, fullgraph=True, dynamic=True, backend="eager")
    for count in (3, 5, 200):
        positions = torch.arange(count)
        found, expected = compiled(rope, positions, positions + 1), rope_tables(rope, positions, positions + 1)
        assert torch.equal(found[0], expected[0]) and torch.equal(found[1], expected[1])

"""The shipped demo model: its text, its training, and the checkpoint itself."""

import json
from pathlib import Path

import numpy as np
import pytest
import torch
from examples_of import example
from tiny_models import plain_logits
from torch.utils._pytree import tree_map

from fnllm import Sampling, generate, load, score
from fnllm_weights import ModelConfig, check_params, local_sizes, save

ROOT = Path(__file__).parents[2]
DEMO = ROOT / "fnllm" / "demo"


text, training, smollm2 = example("demo_text"), example("train_demo"), example("make_smollm2")


# text


def test_bible_chapters_are_one_document_each_without_references():
    lines = "Ge1:1 In the beginning: God.\nGe1:2 And the earth.\nGe2:1 Thus.\n2Jn1:1 The elder.\n"
    assert text.bible_chapters(lines) == ["In the beginning: God. And the earth.", "Thus.", "The elder."]


def test_bible_chapters_refuse_a_line_that_is_no_verse():
    with pytest.raises(ValueError, match="'no reference here'"):
        text.bible_chapters("Ge1:1 In.\nno reference here\n")


def test_novel_chapters_lose_title_pages_line_ends_and_what_follows_the_end():
    novel = """EMMA

By Jane Austen

VOLUME I

CHAPTER I

Emma _was_  handsome,
clever, and rich.

She spoke.

Chapter 2.

In this chapter ix was
no heading.

FINIS

A NOTE ON THE TEXT
"""
    documents = ["Emma was handsome, clever, and rich.\n\nShe spoke.", "In this chapter ix was no heading."]
    assert text.novel_chapters(novel + "\f" + "\n") == documents


def test_tokenizer_gives_any_text_back():
    tokenizer = text.train_tokenizer(["the cat and the hat"] * 5, vocabulary=270)
    assert tokenizer.token_to_id(text.END_OF_TEXT) == 0
    for sample in ("the hat", " spaces  and\n\nlines", "héllo 你好 👩‍👩‍👧", "\x00\x7f"):
        assert tokenizer.decode(tokenizer.encode(sample).ids) == sample


def test_split_holds_out_whole_documents():
    tokenizer = text.train_tokenizer(["ab cd"] * 3, vocabulary=262)
    every = training.HELD_OUT_EVERY
    documents = [f"doc {index}" for index in range(2 * every)]
    train, held_out = training.split_tokens(text.DOCUMENT_BREAK.join(documents), tokenizer)
    read = [tokenizer.decode(s.tolist(), skip_special_tokens=False).split(text.END_OF_TEXT) for s in (train, held_out)]
    assert [part[0] == part[-1] == "" for part in read] == [True, True]
    assert read[1][1:-1] == [documents[every - 1], documents[2 * every - 1]]
    assert sorted(read[0][1:-1] + read[1][1:-1]) == sorted(documents)


# training

SMALL = {
    **training.MODEL,
    "vocab_size": 11,
    "hidden_size": 12,
    "intermediate_size": 20,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 6,
}
RECIPE = training.Recipe(epochs=40, context=7, batch=3, learning_rate=2e-2, dropout=0.05)


@pytest.fixture(scope="module")
def trained():
    stream = torch.arange(50) * 3 % 11  # each token tells the next
    return training.train(ModelConfig.from_dict(SMALL, training.GENERATION), (stream, stream), RECIPE, "cpu", False)


def test_training_learns_and_keeps_the_embedding_tied(trained):
    params, record = trained
    check_params(params)
    assert params.tree["lm_head"] is params.tree["embed"]
    assert params.tree["embed"].dtype == torch.bfloat16
    losses = record["losses"]
    assert losses[0]["held_out"] > 1.5 and losses[-1]["held_out"] < 0.3
    assert losses[-1]["step"] == 96  # 40 epochs of 50 tokens, 21 a step
    json.dumps(record)


def test_training_loss_is_what_score_says(trained):
    params = trained[0]._replace(tree=tree_map(lambda leaf: leaf.float(), trained[0].tree))
    params.tree["lm_head"] = params.tree["embed"]
    windows = torch.randint(11, (3, 8), generator=torch.Generator().manual_seed(0))
    loss = training.loss_functions(params, RECIPE, "cpu", False)[1](params.tree, windows)
    scored = torch.cat(score(params, windows.tolist()))
    torch.testing.assert_close(loss, -scored.mean(), rtol=1e-5, atol=1e-6)


def test_training_repeats_itself(trained):
    stream = torch.arange(50) * 3 % 11
    again = training.train(ModelConfig.from_dict(SMALL, training.GENERATION), (stream, stream), RECIPE, "cpu", False)[0]
    assert torch.equal(again.tree["embed"], trained[0].tree["embed"])


def test_rate_rises_and_falls_to_zero():
    recipe = training.Recipe(learning_rate=2.0, warmup=0.1)
    rates = [training.rate_at(p, recipe) for p in (0.0, 0.05, 0.5, 1.0)]
    assert rates == pytest.approx([0.0, 0.994, 1.0, 0.0], abs=1e-3)


# the checkpoint


@pytest.fixture(scope="module")
def demo():
    return load(device="cpu")


def test_demo_is_small_and_whole():
    names = {path.name for path in DEMO.iterdir()}
    needed = {"config.json", "generation_config.json", "model.safetensors", "tokenizer.json", "tokenizer_config.json"}
    assert needed | {"README.md"} == names
    assert sum(path.stat().st_size for path in DEMO.iterdir()) <= 12_000_000
    assert {path.stat().st_mode & 0o444 for path in DEMO.iterdir()} == {0o444}


def test_demo_is_what_the_script_trains(demo):
    assert demo.config == ModelConfig.from_dict(training.MODEL, training.GENERATION)
    assert local_sizes(demo.config, demo.shard).vocab_rows == 4096


# the start of a chapter that training never saw
HELD_OUT = (
    "And it came to pass after these things, that the butler of the king of Egypt and his baker had offended their "
    "lord the king of Egypt. And Pharaoh was wroth against two of his officers, against the chief of the butlers, and "
    "against the chief of the bakers. And he put them in ward in the house of the captain of the guard, into the "
    "prison, the place where Joseph was bound."
)


def test_demo_prefers_english_to_its_words_shuffled(demo):
    shuffled = " ".join(np.random.default_rng(0).permutation(HELD_OUT.split()))
    scores = score(demo, [demo.tokenizer.encode(sample) for sample in (HELD_OUT, shuffled)])
    assert scores[0].mean() > -3.1  # the mean of all held-out chapters
    assert scores[1].mean() < scores[0].mean() - 2


# At each of these steps the best token leads by 0.05 or more, so rounding does not change the text.
GREEDY = {
    "And the LORD said unto Moses": ", Go up, go up into the mount, and stand before the LORD: And thou shalt",
    "It was a": " very fine place, and the very beautiful place, and the beautiful prospects of the house",
}


@pytest.mark.parametrize("prompt", GREEDY)
def test_demo_completes_a_prompt_as_it_always_did(demo, prompt):
    expected = GREEDY[prompt]
    greedy = Sampling(temperature=0, max_tokens=len(demo.tokenizer.encode(expected)))
    assert generate(demo, prompt, greedy, compile="none", progress=False)[0].text == expected


def test_demo_stops_at_the_end_of_a_chapter(demo):
    """The last psalm ends here, and training ended each document with the end-of-text token."""
    verse = "Let every thing that hath breath praise the LORD. Praise ye the LORD."
    (completion,) = generate(demo, verse, Sampling(temperature=0, max_tokens=4), compile="none", progress=False)
    assert (completion.text, completion.finish_reason, completion.stop_reason) == ("", "stop", 0)


def test_demo_agrees_with_transformers(demo):
    transformers = pytest.importorskip("transformers")
    reference = transformers.AutoModelForCausalLM.from_pretrained(DEMO, dtype=torch.float32)
    sentence = "Mr. Darcy, said the LORD, is a man of 10,000 a year."
    ids = demo.tokenizer.encode(sentence)
    assert transformers.AutoTokenizer.from_pretrained(DEMO).encode(sentence) == list(ids)
    with torch.no_grad():
        torch.testing.assert_close(plain_logits(demo, ids), reference(torch.tensor([ids])).logits[0], rtol=0, atol=1e-4)


def test_saved_weights_can_be_read_by_whom_the_config_can(demo, tmp_path):
    save(demo, tmp_path)
    modes = {path.name: path.stat().st_mode & 0o777 for path in tmp_path.iterdir()}
    assert modes["model.safetensors"] == modes["config.json"]
    assert (tmp_path / "model.safetensors").read_bytes() == (DEMO / "model.safetensors").read_bytes()


# weights of other makers


def test_rotary_order_is_undone():
    heads, half, hidden = 3, 2, 5
    rows = np.arange(heads * 2 * half * hidden, dtype=np.float32).reshape(heads, 2, half, hidden)
    interleaved = rows.swapaxes(1, 2).reshape(-1, hidden)
    np.testing.assert_array_equal(smollm2.restore_rotary_order(interleaved, heads), rows.reshape(-1, hidden))


def test_checkpoint_names():
    assert smollm2.checkpoint_name("token_embd.weight") == "model.embed_tokens.weight"
    assert smollm2.checkpoint_name("blk.12.ffn_down.weight") == "model.layers.12.mlp.down_proj.weight"
    with pytest.raises(ValueError, match="blk.0.attn_sinks.weight"):
        smollm2.checkpoint_name("blk.0.attn_sinks.weight")

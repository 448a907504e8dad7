"""The table of supported architectures, and the config fields that are read or safely ignored."""

from typing import NamedTuple


class Architecture(NamedTuple):
    """What follows from a name in `architectures`; a bias is True, False or the config field that decides."""

    model_type: str
    qk_norm: bool
    qkv_bias: bool | str
    o_bias: bool | str
    mlp_bias: bool | str
    # Which layers have the sliding window: "none"; "all" of them; "switched": all, if use_sliding_window;
    # "layers": those that layer_types (or max_window_layers) names, if use_sliding_window.
    window: str
    max_positions: int  # where max_position_embeddings is missing
    sparse: bool = False


ARCHITECTURES: dict[str, Architecture] = {
    "Qwen3ForCausalLM": Architecture("qwen3", True, "attention_bias", "attention_bias", False, "layers", 32768),
    "Qwen2ForCausalLM": Architecture("qwen2", False, True, False, False, "layers", 32768),
    "LlamaForCausalLM": Architecture("llama", False, "attention_bias", "attention_bias", "mlp_bias", "none", 2048),
    "MistralForCausalLM": Architecture("mistral", False, False, False, False, "all", 131072),
    "Qwen3MoeForCausalLM": Architecture(
        "qwen3_moe", True, "attention_bias", "attention_bias", False, "switched", 32768, sparse=True
    ),
}

# Fields that ModelConfig reads for every architecture.
COMMON_FIELDS = frozenset(
    """architectures model_type vocab_size hidden_size intermediate_size num_hidden_layers num_attention_heads
    num_key_value_heads head_dim rms_norm_eps hidden_act tie_word_embeddings max_position_embeddings rope_theta
    rope_scaling rope_parameters original_max_position_embeddings partial_rotary_factor bos_token_id eos_token_id
    dtype torch_dtype quantization_config""".split()
)
WINDOW_FIELDS = {
    "none": frozenset(),
    "all": frozenset({"sliding_window"}),
    # max_window_layers stands in published sparse configs, where no implementation reads it any more.
    "switched": frozenset({"sliding_window", "use_sliding_window", "max_window_layers"}),
    "layers": frozenset({"sliding_window", "use_sliding_window", "max_window_layers"}),
}
SPARSE_FIELDS = frozenset(
    """num_experts num_local_experts num_experts_per_tok moe_intermediate_size norm_topk_prob decoder_sparse_step
    mlp_only_layers""".split()
)

# Fields seen in published configs that do not change what the model computes at inference.
HARMLESS_FIELDS = frozenset(
    """attention_dropout attn_pdrop embd_pdrop hidden_dropout resid_pdrop initializer_range use_cache
    pretraining_tp pad_token_id unk_token_id sep_token_id cls_token_id mask_token_id decoder_start_token_id
    transformers_version transformers.js_config name_or_path tokenizer_class model_max_length is_llama_config
    unsloth_fixed unsloth_version router_aux_loss_coef output_router_logits router_jitter_noise
    output_attentions output_hidden_states output_scores return_dict return_dict_in_generate torchscript
    use_bfloat16 tf_legacy_loss is_decoder chunk_size_feed_forward gradient_checkpointing attn_implementation
    use_flash_attn max_sequence_length id2label label2id problem_type finetuning_task task_specific_params prefix
    pruned_heads num_return_sequences max_length min_length do_sample early_stopping num_beams num_beam_groups
    diversity_penalty temperature top_k top_p typical_p repetition_penalty length_penalty no_repeat_ngram_size
    encoder_no_repeat_ngram_size bad_words_ids forced_bos_token_id forced_eos_token_id remove_invalid_values
    exponential_decay_length_penalty suppress_tokens begin_suppress_tokens""".split()
)

# Which entries of rope_parameters each scaling reads: (required, optional).
ROPE_FIELDS: dict[str, tuple[frozenset[str], frozenset[str]]] = {
    "default": (frozenset(), frozenset()),
    "linear": (frozenset({"factor"}), frozenset()),
    "dynamic": (frozenset({"factor"}), frozenset()),
    "yarn": (
        frozenset({"factor"}),
        frozenset(
            """original_max_position_embeddings attention_factor beta_fast beta_slow mscale mscale_all_dim
            truncate""".split()
        ),
    ),
    "longrope": (
        frozenset({"short_factor", "long_factor"}),
        frozenset({"factor", "attention_factor", "original_max_position_embeddings"}),
    ),
    "llama3": (
        frozenset({"factor", "low_freq_factor", "high_freq_factor"}),
        frozenset({"original_max_position_embeddings"}),
    ),
}


def find_architecture(config: dict) -> tuple[str, Architecture]:
    """Name and table entry of a config.json; ValueError with the supported names when there is none."""
    named = config.get("architectures")
    supported = f"supported: {', '.join(ARCHITECTURES)}"
    if not named:
        # Hand-written configs may lack the list; model_type then says the same.
        by_type = {entry.model_type: name for name, entry in ARCHITECTURES.items()}
        named = [by_type.get(config.get("model_type", ""), "")]
        if named == [""]:
            raise ValueError(
                f"config.json names no architecture (model_type={config.get('model_type')!r}); {supported}"
            )
    if not isinstance(named, list | tuple) or len(named) != 1 or str(named[0]) not in ARCHITECTURES:
        found = ", ".join(map(str, named)) if isinstance(named, list | tuple) else repr(named)
        raise ValueError(f"architecture {found} is not supported; {supported}")
    return named[0], ARCHITECTURES[named[0]]

def decode_counters(context_lens, num_kv_heads):
    raise NotImplementedError
def paged_attention_triton(*args, **kw):
    raise NotImplementedError

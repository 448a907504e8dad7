"""From a request's new ids to its text: detokenization and stop strings in one value.

`generate` and `stream` both go through this, whether text is wanted or only ids, so that they cannot differ.
"""

from collections.abc import Sequence
from typing import NamedTuple

from fnllm.sampling import Sampling
from fnllm.text import detokenize, stop
from fnllm.text.detokenize import Detok
from fnllm.text.stop import StopState
from fnllm_weights.tokenizer import Tokenizer


class Output(NamedTuple):
    """The text side of one running request."""

    detok: Detok | None  # None without a tokenizer: then there is no text
    stops: StopState
    min_tokens: int = 0
    seen: int = 0  # new tokens so far, counted for stop strings alone
    special: tuple[tuple[int, str], ...] = ()  # stop strings that are special tokens, which the text never shows

    @property
    def matched(self) -> str | None:
        """The stop string that ended the request, if one did."""
        return self.stops.matched


def begin(tokenizer: Tokenizer | None, sampling: Sampling) -> Output:
    """The state before the first new id."""
    stops = stop.start(sampling.stop, sampling.include_stop)
    if tokenizer is None:
        return Output(None, stops, sampling.min_tokens)
    named = ((tokenizer.token_id(text), text) for text in sampling.stop)
    special = tuple((id, text) for id, text in named if id in tokenizer.special_ids)
    return Output(detokenize.start(tokenizer), stops, sampling.min_tokens, special=special)


def feed(output: Output, ids: Sequence[int]) -> tuple[Output, str, int]:
    """Take new ids that did not end the request by themselves; return (output, new text, how many ids were used).

    Once a stop string is complete (`output.matched`), the ids after the one that completed it are not used, and the
    request's ids end with that one.
    """
    detok, stops, min_tokens, seen, special = output
    if stops.matched is not None:
        return output, "", 0
    if detok is None:
        return output, "", len(ids)
    if not stops.stops:  # the usual case, made quick: it runs for every sequence in every step
        after, text = detokenize.push(detok, ids)
        return output if after is detok else Output(after, stops, min_tokens), text, len(ids)
    shown = []
    for id in ids:
        seen += 1
        armed = seen >= min_tokens
        named = dict(special).get(id) if armed and special else None
        detok, text = detokenize.push(detok, (id,))
        if named is not None:  # no id follows, so what was held back comes out first
            text += detokenize.flush(detok)
        stops, text = stop.push(stops, text, armed=armed)
        if named is not None and stops.matched is None:
            text += stop.flush(stops) + (named if stops.include else "")
            stops = stops._replace(held="", matched=named)
        shown.append(text)
        if stops.matched is not None:
            break
    return Output(detok, stops, min_tokens, seen, special), "".join(shown), seen - output.seen


def finish(output: Output, stop_id: int | None = None) -> tuple[Output, str]:
    """End the request; return (output, last text). `stop_id` is the eos or stop id that ended it, if one did.

    The stop id counts among the request's ids; it shows in the text only with include_stop, and never if it is
    special. Text held back comes out, and may itself complete a stop string.
    """
    if output.matched is not None or output.detok is None:
        return output, ""
    detok, text = output.detok, ""
    seen = output.seen + (stop_id is not None)
    if stop_id is not None and output.stops.include:
        detok, text = detokenize.push(detok, (stop_id,))
    text += detokenize.flush(detok)
    stops, shown = stop.push(output.stops, text, armed=seen >= output.min_tokens)
    if stops.matched is None:
        shown += stop.flush(stops)
    return output._replace(detok=detok, stops=stops._replace(held=""), seen=seen), shown

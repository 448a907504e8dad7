"""A request's new ids to its text: detokenizing and stop strings in one value.

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
    count: int = 0  # new tokens so far, counted for stop strings alone

    @property
    def matched(self) -> str | None:
        """The stop string that ended the request, if one did."""
        return self.stops.matched


def begin(tokenizer: Tokenizer | None, sampling: Sampling) -> Output:
    """The state before the first new id."""
    detok = None if tokenizer is None else detokenize.start(tokenizer)
    return Output(detok, stop.start(sampling.stop, sampling.include_stop), sampling.min_tokens)


def feed(output: Output, ids: Sequence[int]) -> tuple[Output, str, int]:
    """Take new ids that did not end the request by themselves; return (output, new text, how many ids were used).

    Once a stop string is complete (`output.matched`), the ids after the one that completed it are not used, and the
    request's ids end with that one.
    """
    detok, stops, min_tokens, count = output
    if stops.matched is not None:
        return output, "", 0
    if detok is None:
        return output, "", len(ids)
    if not stops.stops:  # the usual case, made quick: it runs for every sequence in every step
        after, text = detokenize.push(detok, ids)
        return output if after is detok else Output(after, stops, min_tokens), text, len(ids)
    shown = []
    for id in ids:
        count += 1
        detok, text = detokenize.push(detok, (id,))
        stops, text = stop.push(stops, text, armed=count >= min_tokens)
        shown.append(text)
        if stops.matched is not None:
            break
    return Output(detok, stops, min_tokens, count), "".join(shown), count - output.count


def finish(output: Output, stop_id: int | None = None) -> tuple[Output, str]:
    """End the request; return (output, last text). `stop_id` is the eos or stop id that ended it, if one did.

    The stop id counts among the request's ids; it shows in the text only with include_stop, and never if it is
    special. Text held back comes out, and may itself complete a stop string.
    """
    if output.matched is not None or output.detok is None:
        return output, ""
    detok, text = output.detok, ""
    count = output.count + (stop_id is not None)
    if stop_id is not None and output.stops.include:
        detok, text = detokenize.push(detok, (stop_id,))
    text += detokenize.flush(detok)
    stops, shown = stop.push(output.stops, text, armed=count >= output.min_tokens)
    if stops.matched is None:
        shown += stop.flush(stops)
    return output._replace(detok=detok, stops=stops._replace(held=""), count=count), shown

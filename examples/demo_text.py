"""Make the demo model's text and tokenizer, for `train_demo.py`.

The text is the King James Bible and the six novels of Jane Austen, all out of copyright, with one document per chapter.
Both are Debian packages, and this script gets the text from their programs:

    apt-get install bible-kjv bible-kjv-text r-cran-janeaustenr
    python examples/demo_text.py data/          # writes data/text.txt and data/tokenizer.json
"""

import argparse
import re
import subprocess
import sys
from pathlib import Path

from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

DOCUMENT_BREAK = "\f"  # a form feed between documents: no text has one inside
END_OF_TEXT = "<|endoftext|>"
VOCABULARY = 4096

BIBLE_COMMAND = ("bible", "-f", "Gen1:1-Rev22:21")
AUSTEN_COMMAND = (
    "Rscript",
    "-e",
    'for (name in data(package = "janeaustenr")$results[, "Item"])'
    ' cat(getExportedValue("janeaustenr", name), "\\f", sep = "\\n")',
)
VERSE = re.compile(r"(?P<chapter>\w+):\d+ (?P<text>.*)")
HEADING = re.compile(r"^[ \t]*(?:volume|chapter)[ \t]+(?:\d+|[ivxl]+)\.?[ \t]*$", re.IGNORECASE | re.MULTILINE)
BOOK_END = re.compile(r"^(?:the end|finis)\s*$", re.IGNORECASE | re.MULTILINE)


def bible_chapters(text: str) -> list[str]:
    """One document a chapter, from lines such as `Ge1:1 In the beginning...`, without their references."""
    chapters: dict[str, list[str]] = {}
    for line in text.splitlines():
        verse = VERSE.fullmatch(line)
        if verse is None:
            raise ValueError(f"expected a verse such as 'Ge1:1 In the beginning', found {line!r}")
        chapters.setdefault(verse["chapter"], []).append(verse["text"].strip())
    return [" ".join(verses) for verses in chapters.values()]


def novel_chapters(text: str) -> list[str]:
    """One document a chapter, from novels with form feeds between: no title pages, hard line ends or underscores."""
    documents = []
    for novel in text.split("\f"):
        body = BOOK_END.split(novel)[0]
        for chapter in HEADING.split(body)[1:]:  # what stands before the first heading is the title page
            paragraphs = (" ".join(paragraph.split()) for paragraph in re.split(r"\n\s*\n", chapter))
            documents.append("\n\n".join(p.replace("_", "") for p in paragraphs if p))
    return [document for document in documents if document]  # a volume's heading is followed by a chapter's


def train_tokenizer(documents: list[str], vocabulary: int = VOCABULARY) -> Tokenizer:
    """A byte-level BPE tokenizer: every byte is in its alphabet, so no text is out of its reach."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocabulary,
        special_tokens=[END_OF_TEXT],
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    tokenizer.train_from_iterator(documents, trainer)
    return tokenizer


def output_of(command: tuple[str, ...]) -> str:
    """What the command prints; leaves with a sentence if it is missing or fails."""
    try:
        return subprocess.run(command, check=True, capture_output=True, text=True).stdout
    except (OSError, subprocess.CalledProcessError) as error:
        sys.exit(f"{command[0]} gave no text ({error}): apt-get install bible-kjv bible-kjv-text r-cran-janeaustenr")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("out", type=Path, help="folder for text.txt and tokenizer.json")
    out = parser.parse_args().out
    documents = bible_chapters(output_of(BIBLE_COMMAND)) + novel_chapters(output_of(AUSTEN_COMMAND))
    out.mkdir(parents=True, exist_ok=True)
    (out / "text.txt").write_text(DOCUMENT_BREAK.join(documents), encoding="utf-8")
    train_tokenizer(documents).save(str(out / "tokenizer.json"), pretty=False)
    print(f"{out}: {len(documents)} documents, {sum(map(len, documents)):,} characters")


if __name__ == "__main__":
    main()

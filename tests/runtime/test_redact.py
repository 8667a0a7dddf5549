"""Secrets removed from text, in every form in which programs show them, and nothing else."""

from __future__ import annotations

import json
import os
import re
import string
from pathlib import Path
from urllib.parse import quote, quote_plus

from hypothesis import given
from hypothesis import strategies as st
from rows import for_each

from cloudtrain.runtime.logs import LogWriter
from cloudtrain.runtime.redact import SHORTEST, Redactor

PEM = "-----BEGIN KEY-----\nMIIEvQIBADANBgkqhkiG9w0BAQEF\n\tshort\nBKcwggSjAgEAAoIBAQC7VJTUt9Us\n-----END KEY-----\n"


def taught(**secrets: str) -> Redactor:
    made = Redactor()
    made.learn(secrets)
    return made


@given(st.text(min_size=SHORTEST, max_size=40).filter(lambda text: len(text.strip("\r\n")) >= SHORTEST), st.text())
def test_no_form_of_a_value_comes_through(value: str, around: str) -> None:
    redact = taught(TOKEN=value)
    shown = value.encode("utf-8", "surrogateescape") if value.isascii() else value.encode("utf-8", "replace")
    forms = [value, repr(value), json.dumps(value), f"https://u:{quote(value, safe='', errors='replace')}@h/"]
    for form in [*forms, quote_plus(value, errors="replace"), shown.decode()]:
        assert value.strip("\r\n") not in redact(f"{around}{form}{around}").replace("***TOKEN***", "")


@for_each("form", [PEM, repr(PEM), json.dumps({"key": PEM}), str({"KEY": PEM})])
def test_no_line_of_a_value_with_several(form: str) -> None:
    redact = taught(KEY=PEM)
    for text in (form, *form.splitlines()):
        said = redact(text)
        assert "MIIEvQ" not in said
        assert "BKcwgg" not in said


def test_the_longest_goes_first_and_the_first_name_counts() -> None:
    redact = taught(SHORT="abcdefgh", LONG="abcdefgh-ijklmnop", SAME="abcdefgh")
    assert redact("abcdefgh-ijklmnop abcdefgh") == "***LONG*** ***SHORT***"
    redact.learn({"LATER": "qrstuvwx"})
    assert redact("qrstuvwx abcdefgh") == "***LATER*** ***SHORT***"


def test_what_is_short_or_unknown_stays() -> None:
    redact = taught(PIN="1234567", EMPTY="", SPACES="\n\n\n\n\n\n\n\n\n")
    text = string.printable + "1234567"
    assert redact(text) == text
    assert Redactor()(text) == text


def test_a_value_that_is_no_utf_8() -> None:
    value = b"caf\xe9-caf\xe9-caf\xe9".decode("utf-8", "surrogateescape")
    assert taught(T=value)("x caf\ufffd-caf\ufffd-caf\ufffd y") == "x ***T*** y"


def test_lines_and_segments_have_none_whenever_it_was_learnt(tmp_path: Path) -> None:
    out, into = os.pipe()
    try:
        writer = LogWriter(node=0, out=into)
        writer.redact.learn({"TOKEN": "hunter2-hunter2"})
        writer.write("3", "before the attempt is known: hunter2-hunter2")
        writer.begin("0.0", folder := tmp_path / "logs")
        writer.say("cloudtrain's own word: hunter2-hunter2")
        writer.flush()
        printed = os.read(out, 10000).decode()
    finally:
        os.close(into)
        os.close(out)
    kept = re.sub(r" \S+Z\]", "]", "".join(path.read_text() for path in folder.iterdir()))
    assert printed == kept
    assert (printed.count("***TOKEN***"), printed.count("hunter2")) == (2, 0)


def test_fields_of_a_secret_that_is_json() -> None:
    redact = Redactor()
    redact.learn(
        {"DB": '{"username": "trainer-1", "password": "hunter2-hunter2", "hosts": [{"api_key": "0123456789"}]}'}
    )
    assert redact("trainer-1 connects with hunter2-hunter2, 0123456789") == "trainer-1 connects with ***DB***, ***DB***"

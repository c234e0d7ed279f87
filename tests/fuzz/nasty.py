"""Values that somebody will write one day."""

from __future__ import annotations

from random import Random

NASTY = (
    "", "''", '""', "'", '"', "null", "None", "~", "true", "[]", "{}", "[", "]", "{", "}", "[[]]", "[{}]", "{a:{b:1}}",
    "nan", "inf", "-inf", "-0", "0", "1", "-1", "1e400", "-1e400", "1e-400", "0x10", "1_000", "1e3", "9" * 400,
    "9" * 5000, "0." + "0" * 5000 + "1", "--", "-1.5", "+1", ".5", "5.", "1,2", "1;2", "a b", " a", "a ", "\t", "\n", "a\nb",
    "\x1b[31mred", "\x07", "\x7f", "\u200b", "\u202eabc", "\ufeff", "\ud800", "é", "ж", "漢字", "🙂", "e\u0301" * 40,
    "${nope}", "${seed}", "${model.name}", "${sampling}", "${.k}", "${..seed}", "${oc.env:HOME}", "${oc.env:NOPE}",
    "${oc.env:NOPE,1}", "${oc.decode:'[1,2]'}", "${oc.create:{a:1}}", "${oc.select:seed}", "${hydra:runtime.cwd}",
    "${sampling.temperature}", "${speculation.k}", "${", "${}", "}${", "$", "$$", "${a:${b:${c}}}", "???", "[???]", "*", "&a", "!!int 5",
    "!!python/object/apply:os.system [id]", "@", "#", "a#b", "%s", "{0}", "\\", "\\'", "a\\", "../../x", "/dev/null", "/dev/stdin",
    "~/x", "~nobody/x", "/" * 5000, "a" * 100_000, "[" * 1000, "[" * 100 + "]" * 100, "{a:" * 50 + "1" + "}" * 50,
    "[" + ",".join("1" * 1 for _ in range(5000)) + "]", "[1,a,2.5,true,null,{a:1}]", "{1:2,a:b}", "{a:1,a:2}", "{-1:1}", "{1.5:2}", "{null:1}",
    "[\"a\",'b',c]", "[nan]", "[-1]", "[inf]", "[1e99]", "['']", "[' ']", "cpu", "cuda", "cuda:0", "cuda:-1", "cuda:99999", "meta", "20GiB", "-1GiB",
    "{cpu:20GiB}", "{cpu:x}", "{0:20GiB}", "png", "x.png", "/x.png", ".png", "1:00:00", "99999-00", "0", "$(id)", "`id`", "; id", "a'b", 'a"b',
    "--wrap=id", "[--wrap=id]", "[--exclusive]", "['--x=a\nb']",
)  # fmt: skip
LETTERS = (
    "abkz01 .,:;=+-~@#$%&*()[]{}<>\"'\\/|?!_\t\n\r\x00\x1b\x7f\u200d\u202e\ufeff\ufffdéж漢🙂\u0301\ud83d"
)


def noise(random: Random, most: int) -> str:
    """A few characters of many kinds."""
    return "".join(random.choice(LETTERS) for _ in range(random.randrange(most + 1)))

"""Strategies of commands whose arguments, YAML, experiments and reward functions are wrong in all kinds of ways."""

from __future__ import annotations

from functools import cache

import yaml
from hypothesis import strategies as st

from realrl.config.keys import known_keys
from realrl.experiment.discovery import experiment_names, load_experiment
from tests.fuzz.command import Command
from tests.fuzz.mutations import NASTY_TEXTS, numbers, spoilt, texts, values

LOOKING = (("graph",), ("config",), ("run", "--dry-run"), ("run", "launcher=inline", "steps=2"), ("eval", "--dry-run"))
SMALL = ("preset=tiny", "n_seqs=8", "generation.max_new_tokens=8")


@cache
def _keys(experiment: str) -> list[str]:
    return [*known_keys(load_experiment(experiment)), "preset", "cluster", "allocation", "models.actor", "nothing.here"]


def _typed(value: object) -> str:
    """A value as it might be typed; NUL cannot be typed at all."""
    text = value if isinstance(value, str) else yaml.dump(value, default_flow_style=True, width=10**9).split("\n...")[0]
    return text.replace("@digits@", "9" * 5000).replace("\0", "0").strip("\n")


override_values = st.one_of(
    values.map(_typed),
    numbers.map(_typed),
    st.sampled_from(NASTY_TEXTS).map(_typed),
    st.text("[]{},:'\"$()\\ a1=~*é-.", max_size=30),
    st.sampled_from(
        ["[" * 900 + "]" * 900, "{a:" * 300, "1," * 1500, "choice(1,2)", "${a}", "[1,2", "d1@0:0", "'" * 99]
    ),
)


@st.composite
def command_lines(draw: st.DrawFn) -> Command:
    """A known command with strange overrides, or a strange command."""
    if draw(st.integers(0, 9)) == 0:
        words = st.sampled_from(["run", "graph", "ppo", "--help", "--dry-run", "--json", "x.json", "-h", "list", "gen"])
        return Command(tuple(draw(st.lists(words | texts.map(_typed), max_size=6))))
    name = draw(st.sampled_from(experiment_names()))
    command = draw(st.sampled_from([*LOOKING, *LOOKING, ("doctor", "--no-models")]))
    if draw(st.integers(0, 19)) == 0:
        name = draw(texts.map(_typed) | st.sampled_from(["a/" * 2000, "x" * 5000, "a.b.c", ".", "./", "os", "os.path"]))
    overrides = []
    for _ in range(draw(st.integers(1, 3))):
        key = draw(st.sampled_from(_keys("ppo" if name not in experiment_names() else name)) | texts.map(_typed))
        overrides.append(draw(st.sampled_from(["", "", "", "", "+", "~"])) + f"{key}={draw(override_values)}")
    small = SMALL if draw(st.integers(0, 9)) else ("preset=tiny",)
    return Command((command[0], name, *command[1:], *small, *overrides))


@st.composite
def yaml_files(draw: st.DrawFn) -> Command:
    """A preset of the user's own: a valid one with wrong values, or text that is hardly YAML."""
    name = draw(st.sampled_from(["ppo", "grpo", "sft", "dpo", "safe_rlhf"]))
    kind = draw(st.integers(0, 3))
    if kind < 3:
        valid = {
            "steps": 2,
            "n_seqs": 8,
            "seed": 1,
            "track": [],
            "dataset": {"path": "tiny", "max_prompt_tokens": 32},
            "generation": {"max_new_tokens": 8, "stop_ids": [1, 2], "temperature": 1.0},
            "models": {
                "*": {"path": "tiny", "optimizer": {"lr": 1e-3, "betas": [0.9, 0.95]}},
                "actor": {"path": "tiny"},
            },
            "cluster": {"n_devices_per_node": 1},
            "allocation": {"mode": "data", "calls": {"actor_gen": "d1@0:0"}},
            "calls": {"actor_gen": {"n_mbs": 1}},
            "algorithm": {"n_minibatches": 1},
            "eval": {"every_steps": 0},
        }
        text = yaml.dump(draw(spoilt(valid)), allow_unicode=draw(st.booleans()))
        text = text.replace("'@digits@'", "9" * 5000).replace("'@deep@'", "[" * 3000)
        if kind == 2:
            text = (
                draw(st.sampled_from(["<<: {}\n", "&a ", "*a", "!!binary ", "!!set ", "--- ", "%YAML 9\n", "\t"]))
                + text
            )
    else:
        lines = [f"a{i}: &a{i} [{', '.join([f'*a{i - 1}'] * 9)}]" for i in range(1, draw(st.integers(1, 40)))]
        loops = [
            "&a [*a]",
            "a: &a {b: *a}",
            "a: &a\n  <<: *a",
            "? [1]\n: 2",
            "[" * 5000,
            "- " * 3000,
            "a: b: c",
            "{" * 99,
        ]
        bomb = "a0: &a0 [x]\n" + "\n".join(lines)
        text = draw(st.sampled_from([bomb, *loops]) | st.text(max_size=60) | st.just("0x" + "f" * 6000) | texts)
    command = draw(st.sampled_from(LOOKING))
    content = text.encode("utf-8", "surrogatepass")
    return Command((command[0], name, *command[1:], "preset=own.yaml"), {"own.yaml": content})


@st.composite
def allocations(draw: st.DrawFn) -> Command:
    """Strategies, meshes and clusters, well-formed and not."""
    size = st.sampled_from([0, 1, 2, 3, 4, 8, 63, 64, 4096, 10**6, 10**9, 10**30])
    strategy = st.lists(st.builds("{}{}".format, st.sampled_from("dtp"), size), max_size=3).map("".join)
    forms = ["{0}:{1}-{2}", "{0}-{1}", "{0}:{1}", "{0}", "{0}:{1}-{2}-{0}", ""]
    mesh = st.builds(lambda form, *n: form.format(*n), st.sampled_from(forms), size, size, size)
    text = st.builds(lambda s, m, e: f"{s}{e}@{m}", strategy, mesh, st.sampled_from(["", "s", "ss", " "]))
    modes = ["split", "tensor", "manual", "heuristic", "standalone", "colocate", "pipeline"]
    text = text | strategy | st.sampled_from(modes) | texts.map(_typed)
    cluster = [f"cluster.n_nodes={draw(size)}", f"cluster.n_devices_per_node={draw(size)}"][: draw(st.integers(0, 2))]
    name = draw(st.sampled_from(["ppo", "grpo", "sft", "safe_rlhf"]))
    calls = ["actor_gen", "actor_train", "rew_inf", "sft_train", "critic_train", "nope"]
    chosen = [f"allocation.calls.{draw(st.sampled_from(calls))}={draw(text)}" for _ in range(draw(st.integers(0, 2)))]
    mode = [f"allocation={draw(text)}"] if draw(st.booleans()) else []
    command = draw(st.sampled_from(LOOKING[:3]))
    return Command((command[0], name, *command[1:], *cluster, *mode, *chosen))


EXPERIMENT = """
from realrl import DatasetKind, Experiment, InterfaceType, MFCDef, PPOOptions, Role, Section
N = InterfaceType
def mfcs(config):
    {body}
    return [
        MFCDef({name}, {role}, N.GENERATE, {interface}, {keys}, ("input_ids", "prompt_mask"), n_seqs={n_seqs}),
        MFCDef("rew", "reward", N.INFERENCE, "reward_model", ("input_ids",), ("rewards",), n_seqs=config.n_seqs),
        MFCDef("train", "actor", N.TRAIN_STEP, "sft", ("input_ids", "rewards"), n_seqs=config.n_seqs,
               n_minibatches={n_minibatches}),
    ]
{top}
ROLES = {roles}
EXPERIMENT = {experiment}
{end}
"""
_WHOLE = (
    'Experiment({title}, "d", ROLES, {dataset}, mfcs, options={options}, defaults={defaults}, '
    "role_changes={changes}, check={check}, adds={adds})"
)
_PARTS: dict[str, tuple[str, list[str]]] = {
    "body": (
        "pass",
        [
            "raise KeyError('x' * 9999)",
            "import sys; sys.exit(0)",
            "import os; os._exit(0)",
            "return None",
            "return 5",
            "return [1]",
            "return []",
            "1 / 0",
            "return [None]",
            "yield 1",
            "raise SystemExit",
            "raise GeneratorExit",
            "raise BaseException('no')",
            "config.steps = 3",
            "config.nothing",
            "return mfcs(config)",
        ],
    ),
    "name": ('"gen"', ['"../x"', "5", '""', '"a b"', '"x" * 5000', "None", '"\\0"', '"/"', '"train"', '"rew"', "[]"]),
    "role": ('"actor"', ['"nobody"', "5", "None", '"reward"', '"../x"', "Role", "[]", "{}"]),
    "interface": (
        '"ppo_actor"',
        ['"nope"', "5", "None", '"a:b"', '"os:system"', '":"', "[]", '"x" * 5000', '"a.b.c:d"'],
    ),
    "keys": (
        '("prompt_ids",)',
        ['"prompt_ids"', "5", "None", "(5,)", "()", '("nope",)', "[[]]", '("prompt_ids",) * 2'],
    ),
    "n_seqs": ("config.n_seqs", ["0", "-1", "2.5", '"8"', "None", "10**30", "True", "3", "float('nan')"]),
    "n_minibatches": ("1", ["0", "10**9", "None", '"2"', "1.0"]),
    "top": (
        "",
        [
            "import sys; sys.exit(0)",
            "import os; os._exit(0)",
            "1 / 0",
            "import nothing_at_all",
            "x = (",
            "\\0",
            "raise SystemExit(3)",
            "raise KeyboardInterrupt_",
            "def f(:",
            "assert False, 'y' * 9999",
            "\ud7ff\u202e",
            "é = 1",
            "class E(Exception):\n    def __str__(self): raise ValueError\nraise E",
            "(" * 300 + ")" * 300,
            "x = " + "-" * 20000 + "1",
            "raise BaseException",
            "import sys; sys.stderr = None",
            "exec('sys.exit()')",
            "def g(): g()\ng()",
            "raise RuntimeError('\\n' * 99)",
            "raise UnicodeDecodeError('a', b'', 0, 1, 'x')",
        ],
    ),
    "roles": (
        '{"actor": Role(True), "reward": Role(False, "reward")}',
        [
            "None",
            "{}",
            "[]",
            '{"../x": Role(True)}',
            '{"actor": 5}',
            "{5: Role(True)}",
            '{"actor": Role(True)}',
            '{"actor": Role(True), "reward": Role(False, "none", "nobody")}',
            '{"actor": Role("x"), "reward": Role(0, 9)}',
            '{"actor": Role(True, path_from="reward"), "reward": Role(False, "reward", "actor")}',
            '{f"r{i}": Role(False) for i in range(10**4)}',
            '{"actor": Role(True, "none"), "reward": Role(False)}',
        ],
    ),
    "experiment": (_WHOLE, ["None", "5", "Experiment", "Experiment()", "[Experiment]", _WHOLE, "mfcs", "...", "type"]),
    "title": ('"mine"', ['"../x"', '""', "None", "5", '"x" * 300', '"a/b"', '"\\0"', '"."', '".."', '"модель"']),
    "dataset": ("DatasetKind.PROMPT", ["None", '"prompt"', "DatasetKind", "DatasetKind.PREFERENCE_PAIR", "5"]),
    "options": ("PPOOptions", ["None", "5", "Section", "dict", "PPOOptions()", "object", "type('T', (Section,), {})"]),
    "defaults": (
        "{}",
        [
            "None",
            "5",
            "[]",
            '{"steps": "x"}',
            '{"nope": 1}',
            '{"models": 5}',
            "{5: 6}",
            '{"steps": [[]]}',
            '{"algorithm": {"gamma": 9}}',
            '{"generation": None}',
            '{"models": {"*": {"path": "nowhere"}}}',
            '{"seed": 10**400}',
            '{"a": object()}',
            '{"x" * 9999: 1}',
            '{"run_dir": "\\0"}',
        ],
    ),
    "changes": (
        "None",
        [
            "5",
            "lambda c: None",
            "lambda c: 5",
            "lambda c: {'a': 5}",
            "lambda: {}",
            "lambda c: 1 / 0",
            "lambda c: {'reward': None}",
            "lambda c: {'new': Role(False)}",
            "lambda c: exit(0)",
        ],
    ),
    "check": ("None", ["5", "lambda a, b: 1 / 0", "lambda: 1", "lambda a, b: exit(0)", "print", "lambda a, b: a.x"]),
    "adds": (
        "()",
        [
            "None",
            "5",
            "(5,)",
            "(lambda c, m: None,)",
            "(lambda c, m: [],)",
            "(lambda c, m: m + m,)",
            "[lambda c, m: m]",
            "(print,)",
            "(lambda c, m: exit(0),)",
            "(lambda c, m: [5],)",
        ],
    ),
    "end": (
        "",
        [
            "del EXPERIMENT",
            "EXPERIMENT = [EXPERIMENT]",
            "import sys; sys.exit(2)",
            "EXPERIMENTS = 1",
            "EXPERIMENT.name = 5",
            "def __getattr__(name): raise KeyError(name)",
            "object.__setattr__(EXPERIMENT, 'mfcs', 5)",
        ],
    ),
}


@st.composite
def experiments(draw: st.DrawFn) -> Command:
    """A user's experiment file, with one or two of its parts replaced."""
    parts: dict[str, str] = {name: valid for name, (valid, _) in _PARTS.items()}
    for name in draw(st.lists(st.sampled_from(sorted(_PARTS)), min_size=1, max_size=2, unique=True)):
        parts[name] = draw(st.sampled_from(_PARTS[name][1]))
    source = EXPERIMENT
    for _ in range(2):  # the experiment has parts of its own
        for name, text in parts.items():
            source = source.replace("{" + name + "}", text)
    content = source.encode("utf-8", "surrogatepass")
    if draw(st.integers(0, 9)) == 0:
        junk = st.binary(max_size=99) | st.sampled_from(
            [b"\0", b"(" * 10_000, b"\xff\xfe", b"# coding: nope\n", b"x=" * 9999]
        )
        content = draw(junk)
    command = draw(st.sampled_from(LOOKING))
    file = draw(st.sampled_from(["./mine.py", "mine.py", "./mine.py", "./my mine.py", "./é.py", "deep/er/mine.py"]))
    return Command((command[0], file, *command[1:], *SMALL[:2]), {file: content})


REWARDS = [
    "def score(prompt, response): return 1.0",
    "async def score(prompt, response, row): return 1.0",
    "score = len",
    "def score(): return 1.0",
    "def score(a): return 1",
    "def score(a, b, c, d): pass",
    "def score(a, b, *, c): pass",
    "def score(*args, **kwargs): return 1",
    "def other(a, b): return 1",
    "score = 5",
    "class score: pass",
    "x = (",
    "from math import hypot as score",
    "from nothing import *",
    "import sys; sys.exit(0)",
    "import os; os._exit(0)",
    "raise SystemExit",
    "1 / 0",
    "def score(a, b=1, /, c=2, *d, e=3, **f): pass",
    "lambda: 0",
    "globals()['score'] = len",
    "def __getattr__(name): return len",
    "if True:\n  def score(a, b): pass",
    "def f():\n  def score(a, b): pass",
    "try:\n  from nothing import score\nexcept ImportError:\n  def score(p, r): return 0",
    "@staticmethod\ndef score(a): 1",
    "score: int",
    "(" * 5000,
    "x = " + "1 + " * 20000 + "1",
    "\0",
    "é = 1",
    "def score(a, b): return score(a, b)",
    "match 1:\n  case score: pass",
    "with open('x') as score: pass",
    "for score in []: pass",
    "import score",
    "del score",
]


@st.composite
def reward_files(draw: st.DrawFn) -> Command:
    """A reward function by the name that a user might give it, in a file that may lack it."""
    source = draw(st.sampled_from(REWARDS)).encode("utf-8", "surrogatepass")
    if draw(st.integers(0, 9)) == 0:
        source = draw(st.binary(max_size=60))
    names = [
        "mine.py:score",
        "mine:score",
        "mine.score",
        "mine.py",
        "mine.py:",
        ":score",
        "mine.py:a.b",
        "mine:score:x",
        "nowhere:score",
        "nowhere.py:score",
        "a..b:c",
        "os:system",
        "os.path:join",
        "sys:exit",
        ".mine:score",
        "math_verify",
        "reasoning_gym",
        "overlong",
        "reward_model",
        "mine/:score",
        "./mine.py:score",
        "mine.py:score ",
    ]
    name = draw(st.sampled_from(names[:3] * 8 + names) | texts.map(_typed))
    key = draw(
        st.sampled_from(
            ["algorithm.reward_function"] * 3
            + [
                "algorithm.rewards.mine",
                "algorithm.cost_function",
                "algorithm.advantage",
                "algorithm.policy_loss",
                "algorithm.filter",
                "algorithm.sampler",
            ]
        )
    )
    more = draw(
        st.sampled_from(
            [
                (),
                (),
                ("algorithm.rewards.b={function: 'mine.py:score', options: {x: 1}}",),
                ("algorithm.rewards.overlong={function: overlong, options: {max_tokens: -1}}",),
            ]
        )
    )
    command = draw(st.sampled_from(LOOKING[1:4]))
    experiment = "safe_rlhf" if key.endswith("cost_function") else draw(st.sampled_from(["ppo", "grpo", "gen"]))
    return Command((command[0], experiment, *command[1:], *SMALL, f"{key}={name}", *more), {"mine.py": source})


def whole() -> list[Command]:
    """Commands of which nothing is spoilt, one for each way through the code."""
    rewards = {"mine.py": REWARDS[0].encode()}
    looked = [Command((command[0], "ppo", *command[1:], *SMALL)) for command in LOOKING]
    return [
        *looked,
        Command(("doctor", "ppo", "--no-models", *SMALL)),
        Command(("run", "grpo", "--dry-run", "preset=own.yaml"), {"own.yaml": b"steps: 2\nn_seqs: 8\n"}),
        Command(("run", "ppo", "--dry-run", "algorithm.reward_function=mine.py:score", *SMALL), rewards),
    ]

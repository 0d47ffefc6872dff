"""Package metadata. Exact versions are in constraints.txt; here are the ranges that realrl supports."""

from pathlib import Path

from setuptools import find_packages, setup

ROOT = Path(__file__).parent

CORE = [
    "torch>=2.11,<2.14",
    "networkx>=3.2",
    "pyzmq>=26",
    "msgspec>=0.19",
    "hydra-core>=1.3",
    "pydantic>=2.7",
    "safetensors>=0.4.3",
    "numpy>=1.26",
    "transformers>=5.0",
    "tokenizers>=0.22",
    "jinja2>=3.1",
    "rich>=13.7",
]
EXTRAS = {
    "parquet": ["pyarrow>=16"],
    "track": ["tensorboard>=2.16", "wandb>=0.17"],
    "viz": ["resvg_py>=0.1", "fonttools>=4.50", "matplotlib>=3.8"],
    "rewards": ["math-verify>=0.9", "reasoning-gym>=0.1.25"],
    "megatron": ["megatron-core>=0.16,<0.17"],
    "ray": ["ray>=2.60,<3"],
    "deepspeed": ["deepspeed>=0.19.8,<0.20"],
    "trl": ["trl>=1.16,<1.17"],  # for the tests of parity alone: its losses are what ours are compared with
    "quickstart": ["gguf>=0.10", "vaderSentiment>=3.3.2", "setuptools", "wheel"],
    "dev": [
        "pytest>=8",
        "pytest-timeout>=2.3",
        "pytest-xdist>=3.6",
        "hypothesis>=6.100",
        "ruff>=0.6",
        "mypy>=1.11",
        "import-linter>=2.0",
        "psutil>=5.9",
        "tensorboard>=2.16",
    ],
}

setup(
    name="realrl",
    version="0.1.0",
    description="A declarative dataflow-graph runtime for RLHF and LLM reinforcement learning",
    long_description=(ROOT / "README.md").read_text(encoding="utf-8"),
    long_description_content_type="text/markdown",
    python_requires=">=3.11",
    packages=[*find_packages(include=["realrl", "realrl.*"]), "realrl_experiments", "realrl_configs"],
    package_dir={"realrl_experiments": "experiments", "realrl_configs": "configs"},
    package_data={
        "realrl_configs": ["**/*.yaml"],
        "realrl": [
            "py.typed",
            "cpu/kernels/*.cpp",
            "fusion/*.cpp",
            "search/local/*.cpp",
            "fusion/page/*",
            "cpu/kernels/*.h",
            "draw/page/*",
            "planner/page/page.*",
            "report/page.*",
        ],
    },
    install_requires=CORE,
    extras_require=EXTRAS,
    entry_points={"console_scripts": ["realrl = realrl.cli:main"]},
)

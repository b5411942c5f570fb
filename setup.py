"""Beside megatron-core, never instead of it: `megatron` is a namespace that both share, without an __init__.py."""

from pathlib import Path

from setuptools import Extension, find_namespace_packages, setup

parquet, plot, tensorboard, huggingface, images, urls, test = (
    ["pyarrow>=14"],
    ["matplotlib>=3.8"],
    ["tensorboard>=2.15"],
    ["transformers>=4.40"],
    ["pillow>=10"],
    ["fsspec>=2024.2"],
    ["hypothesis>=6.100", "pytest>=8", "pytest-xdist>=3.5"],
)

setup(
    name="megatron-sft",
    version="0.1.0",
    description="Fine-tune GPT models on sequences of wildly different lengths, on Megatron-Core",
    long_description=Path("README.md").read_text(encoding="utf-8"),
    long_description_content_type="text/markdown",
    license="Apache-2.0",
    license_files=["LICENSE"],
    python_requires=">=3.10",
    packages=find_namespace_packages(
        include=["megatron.blending*", "megatron.packing*", "megatron.planner*", "megatron.sft*"]
    ),
    # Optional: without a C++ compiler scheduling takes plainer ways, slower and a little worse.
    ext_modules=[
        Extension(
            "megatron.packing.scheduling._core",
            sources=["megatron/packing/scheduling/core.cpp"],
            extra_compile_args=["-O3", "-std=c++17"],
            optional=True,
        )
    ],
    install_requires=[
        "torch>=2.10",
        'megatron-core==0.16.1; python_version < "3.12"',
        'megatron-core>=0.19,<0.20; python_version >= "3.12"',
        "numpy>=1.26",
        "pyyaml>=6",
        "psutil>=5.9",  # megatron-core's checkpoints need it and do not say so
        "tqdm>=4.60",
        "safetensors>=0.4",
    ],
    extras_require={
        "parquet": parquet,
        "plot": plot,
        "tensorboard": tensorboard,
        "huggingface": huggingface,
        "images": images,
        "urls": urls,
        "video": ["av>=12"],
        "test": test,
        "dev": [
            *parquet,
            *plot,
            *tensorboard,
            *huggingface,
            *images,
            *urls,
            *test,
            "mypy==2.4.1",
            "ruff==0.17.5",
            "types-PyYAML",
        ],
    },
)

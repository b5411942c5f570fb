"""The one thing that pyproject.toml, which says all else, has no words for: the compiled core is
optional.
"""

from setuptools import Extension, setup

setup(
    # Without a C++ compiler scheduling takes plainer ways, slower and a little worse.
    ext_modules=[
        Extension(
            "megatron.packing.scheduling._core",
            sources=["megatron/packing/scheduling/core.cpp"],
            extra_compile_args=["-O3", "-std=c++17"],
            optional=True,
        )
    ]
)

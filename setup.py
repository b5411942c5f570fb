"""The one thing that pyproject.toml, which says all else, has no words for: the compiled cores
are optional.
"""

from setuptools import Extension, setup

setup(
    # Without a C++ compiler scheduling takes plainer ways, slower and a little worse; the order of
    # blends is the same, and slower to compute.
    ext_modules=[
        Extension(
            f"{folder.replace('/', '.')}._core",
            sources=[f"{folder}/core.cpp"],
            extra_compile_args=["-O3", "-std=c++17"],
            optional=True,
        )
        for folder in ("megatron/packing/scheduling", "megatron/blending/order")
    ]
)

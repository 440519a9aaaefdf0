"""Make a virtual environment with the original torch_xla 2.7.0 for the benchmarks, without several GB of CUDA packages.

torch 2.7.1's default Linux wheel is a CUDA build: it links against cuBLAS, cuDNN and other NVIDIA libraries, and torch_xla 2.7.0
needs exactly this build's ABI. On the CPU none of them is called, so this script installs torch without its dependencies, adds the
real CUDA runtime (under 1 MB) and compiles empty libraries in place of the others (a C compiler and `readelf` are needed).
The result is only good for work on the CPU.

    python benchmarks/torch_xla_venv.py [.cache/torch_xla_venv]
"""

from __future__ import annotations

import re
import subprocess
import sys
from collections import defaultdict
from pathlib import Path

DEFAULT_VENV = Path(__file__).resolve().parents[1] / ".cache" / "torch_xla_venv"
WITHOUT_DEPENDENCIES = ["torch==2.7.1", "torch_xla==2.7.0", "nvidia-cuda-runtime-cu12==12.6.77"]
WITH_DEPENDENCIES = [
    "filelock",
    "typing-extensions",
    "sympy>=1.13.3",
    "networkx",
    "jinja2",
    "fsspec",
    "numpy<2.3",
    "absl-py",
    "pyyaml",
    "requests",
]
TRANSFORMERS = "transformers==5.23.0"
STAMP = "torch_xla_venv.done"

# The libraries that torch/lib/*.so name, with the prefix of their functions (for those that are not versioned).
STUBS = {
    "libcublas.so.12": "cublas",
    "libcublasLt.so.12": "cublasLt",
    "libcudnn.so.9": "cudnn",
    "libcufft.so.11": "cufft",
    "libcupti.so.12": "cupti",
    "libcufile.so.0": "cuFile",
    "libcurand.so.10": "curand",
    "libcusolver.so.11": "cusolver",
    "libcusparse.so.12": "cusparse",
    "libcusparseLt.so.0": "cusparseLt",
    "libnccl.so.2": "nccl",
}
USERS = ["libtorch_cpu.so", "libtorch_cuda.so", "libtorch_python.so", "libtorch_cuda_linalg.so", "libc10_cuda.so"]


def wanted_symbols(torch_lib: Path) -> dict[str, dict[str, str]]:
    """{library: {symbol: its version, or ""}} of everything the torch libraries expect from the stubs."""
    wanted: dict[str, dict[str, str]] = defaultdict(dict)
    for user in USERS:
        table = subprocess.run(["readelf", "--dyn-syms", "-W", str(torch_lib / user)], check=True, capture_output=True, text=True).stdout
        for symbol, version in re.findall(r" UND ([A-Za-z]\w+)(?:@(\S+))?", table):
            if version in STUBS:
                wanted[version][symbol] = version
            elif not version:
                prefixes = [(len(prefix), library) for library, prefix in STUBS.items() if symbol.startswith(prefix)]
                if prefixes:
                    wanted[max(prefixes)[1]][symbol] = ""
    return wanted


def build_stub(library: str, symbols: dict[str, str], folder: Path) -> None:
    source, versions = folder / "stub.c", folder / "stub.map"
    source.write_text("".join(f"int {symbol}(void) {{ return 1; }}\n" for symbol in symbols) or "int unused;\n")
    versioned = [symbol for symbol, version in symbols.items() if version]
    versions.write_text(f"{library} {{ global: {'; '.join(versioned)}; }};\n" if versioned else "")
    script = [f"-Wl,--version-script={versions}"] if versioned else []
    subprocess.run(
        ["cc", "-w", "-fno-builtin", "-shared", "-fPIC", f"-Wl,-soname,{library}", *script, "-o", str(folder / library), str(source)],
        check=True,
    )
    source.unlink()
    versions.unlink()


def make_venv(venv: Path) -> Path:
    """Return the Python of the environment, which is made if it is not there."""
    python = venv / "bin" / "python"
    if (venv / STAMP).exists():
        return python
    subprocess.run([sys.executable, "-m", "venv", str(venv)], check=True)
    pip = [str(python), "-m", "pip", "install", "-q"]
    subprocess.run([*pip, "--no-deps", *WITHOUT_DEPENDENCIES], check=True)
    subprocess.run([*pip, *WITH_DEPENDENCIES], check=True)
    torch_lib = next(venv.glob("lib/python*/site-packages/torch/lib"))
    wanted = wanted_symbols(torch_lib)
    for library in STUBS:
        build_stub(library, wanted.get(library, {}), torch_lib)
    subprocess.run([*pip, TRANSFORMERS], check=True)
    subprocess.run([str(python), "-c", "import torch, torch_xla, transformers"], check=True)
    (venv / STAMP).touch()
    return python


if __name__ == "__main__":
    print(make_venv(Path(sys.argv[1]) if len(sys.argv) > 1 else DEFAULT_VENV))

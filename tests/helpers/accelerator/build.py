"""Build the pretend accelerator for the torch of this Python: half a minute with g++.

    python tests/helpers/accelerator/build.py FOLDER
    PYTHONPATH=FOLDER python my_script.py      the device of torch.accelerator is "pretend" now

See pretend.py for what it pretends.
"""

import argparse
import os
import shutil
import sysconfig
import tempfile
from pathlib import Path

SOURCE = Path(__file__).resolve().parent
FILES = ("pretend.cpp", "streams.h", "memory.h", "device.h", "kernels.h", "group.h", "pretend.py")


def missing():
    """Return what this machine lacks to build it, in words, or None."""
    if not shutil.which("g++"):
        return "needs g++"
    if not Path(sysconfig.get_paths()["include"], "Python.h").exists():
        return "needs the headers of Python (Debian: python3-dev)"
    return None


def build(folder):
    """Build it in a folder, from which PyTorch loads it if PYTHONPATH names the folder."""
    import setuptools
    from torch.utils.cpp_extension import BuildExtension, CppExtension

    with tempfile.TemporaryDirectory() as temporary:
        extension = CppExtension(
            "pretend_device", [str(SOURCE / "pretend.cpp")], extra_compile_args=["-O0", "-w"]
        )
        places = ["--build-lib", str(folder)]
        setuptools.setup(
            name="pretend",
            version="1",
            package_dir={"": str(SOURCE)},
            py_modules=["pretend"],
            ext_modules=[extension],
            # import torch calls what this entry point names
            entry_points={"torch.backends": ["pretend = pretend:load"]},
            cmdclass={"build_ext": BuildExtension.with_options(use_ninja=False)},
            script_args=[
                *["--quiet", "egg_info", "--egg-base", str(folder), "build_py", *places],
                *["build_ext", "--force", *places, "--build-temp", temporary],
            ],
        )


def parse_args():
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("folder", metavar="FOLDER", help="made if it does not exist")
    return parser.parse_args()


if __name__ == "__main__":
    target = Path(parse_args().folder).resolve()
    target.mkdir(parents=True, exist_ok=True)
    os.chdir(SOURCE)  # setuptools reads the pyproject.toml of the current folder
    build(target)
    print(f"built: PYTHONPATH={target} python ...")

"""Start a program, and kill it as soon as a file is there. It is an error if it ends before.

python tools/lab/kill_after.py 'checkpoints/killed/step-*.pt' python 06_imagenet.py --dummy 6400
"""

import glob
import subprocess
import sys
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))

from common.errors import UserError, one_line_errors


def main():
    if len(sys.argv) < 3:
        raise UserError(
            "expected a file and a program: "
            "python tools/lab/kill_after.py 'checkpoints/step-*.pt' python 06_imagenet.py"
        )
    pattern, *command = sys.argv[1:]
    process = subprocess.Popen(command)
    try:
        while not (found := glob.glob(pattern)):
            if process.poll() is not None:
                raise UserError(
                    f"the program ended with exit code {process.returncode} before there was a "
                    f"file {pattern}: expected one that runs on; let it write the file earlier"
                )
            time.sleep(0.02)
    finally:
        process.kill()
        process.wait()
    print(f"killed after it wrote {found[0]}")


if __name__ == "__main__":
    with one_line_errors():
        main()

"""Whether 06 was launched in a way that can work."""

import logging
import os

from common.distributed import LaunchError
from common.errors import UserError

log = logging.getLogger(__name__)


def check_launch(args, d):
    """Check that the launcher is the one of --dist-init-method, and that restarts can work.

    Raises:
        LaunchError, UserError: see the messages.
    """
    check_restarts(d, args.resume or args.evaluate)
    method = args.dist_init_method
    found = f"--dist-init-method {method} under {d.launcher}"
    if method == "env" and d.launcher not in ("torchrun", "nodes"):
        raise LaunchError(found, "torchrun", "torchrun --nproc-per-node=2 06_imagenet.py")
    if method == "slurm" and d.launcher != "srun":
        raise LaunchError(found, "srun", "srun python 06_imagenet.py")


def check_restarts(d, resume):
    """Check that a restart by torchrun continues the training.

    torchrun's agents share one store over all restarts unless TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1.
    Restarted workers then read the addresses of the workers before them, and wait for those. Only
    the agents can read the variable, so a script can only warn.

    Raises:
        UserError: each restart would train from the beginning.
    """
    restarts = os.environ.get("TORCHELASTIC_MAX_RESTARTS", "0")
    if restarts == "0":
        return
    if not resume:
        raise UserError(
            f"--max-restarts={restarts} without --resume: "
            "each restart would begin at zero; add --resume"
        )
    if os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True" and d.is_main:
        log.warning(
            "torchrun was started without TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1: "
            "a restart may hang, or fail for minutes; "
            "on each machine: export TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1"
        )

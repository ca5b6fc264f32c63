"""A checkpoint of which load_state_dict(strict=False) loads nothing."""

import sys

from rank_watch.hooks import replace
from rank_watch.places import own_line

torch = sys.modules.get("torch")


def install(recorder):
    def load(real, module, state_dict, *args, **kwargs):
        keys, given = set(module.state_dict()), set(state_dict)
        result = real(module, state_dict, *args, **kwargs)
        recorder.add(
            "load",
            model=type(module).__name__,
            line=own_line(),
            count=len(keys),
            loaded=len(keys & given),
            expected=min(keys, default=""),
            given=min(given, default=""),
        )
        return result

    replace(torch.nn.Module, "load_state_dict", load)


def judge(runs, judgment):
    for event in runs[0].noted["load"]:
        if event["count"] and event["given"] and not event["loaded"]:
            judgment.found.append(
                f"load_state_dict() of {event['model']} at {event['line']} loaded none of "
                f"{event['count']} tensors: expected names such as {event['expected']}, found "
                f"such as {event['given']}, and strict=False says nothing. Save "
                "ddp.module.state_dict(), or remove the prefix "
                "(docs/troubleshooting.md, case 27)"
            )
            return

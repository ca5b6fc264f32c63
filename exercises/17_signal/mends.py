"""Mends of exercise 17, right and wrong."""

STOP = "    if stop:\n        break\n"
VOTE = "    anyone = torch.tensor(int(stop))\n"
IF_ANYONE = "    if anyone:\n        break\n"
FORWARD = "    ddp(torch.randn(32, 16)).square().mean().backward()\n"

RIGHT = {
    "the decision before the step": [
        (STOP, ""),
        (FORWARD, f"{VOTE}    dist.all_reduce(anyone)\n{IF_ANYONE}{FORWARD}"),
    ],
    "a step to stop at, in the store": [
        (
            STOP,
            "    store = dist.distributed_c10d._get_default_store()\n"
            "    if stop:\n"
            '        store.set("stop", str(step + 1))\n'
            "        stop = False\n"
            '    if store.check(["stop"]) and step >= int(store.get("stop")):\n'
            "        break\n",
        )
    ],
    "a vote in every fourth step": [
        (
            STOP,
            f"    if step % 4:\n        continue\n{VOTE}    dist.all_reduce(anyone)\n{IF_ANYONE}",
        )
    ],
}

WRONG = {
    "rank 0 decides": (
        [(STOP, f"{VOTE}    dist.broadcast(anyone, src=0)\n{IF_ANYONE}")],
        "The signal for rank 1 arrived in step 5, but the training continued to step 20",
    ),
    "the step is known": (
        [(STOP, "    if step == 5:\n        break\n")],
        "Without a signal, the ranks took 5 and 5 training steps",
    ),
    "a collective that only one rank calls": (
        [(STOP, "    if stop:\n        dist.all_reduce(torch.tensor(1))\n        break\n")],
        "The ranks call different collectives: rank 0 calls all_reduce with 272 bytes in line 38",
    ),
}

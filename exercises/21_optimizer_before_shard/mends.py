"""Mends of exercise 21, right and wrong."""

OPTIMIZER = "optimizer = torch.optim.SGD(model.parameters(), lr=0.5)\n"
SHARD = "fully_shard(model, mesh=mesh)\n"
LAYERS = "for layer in (model[0], model[2]):\n    fully_shard(layer, mesh=mesh)\n"

RIGHT = {
    "the optimizer gets the shards": [
        (SHARD, f'{SHARD}optimizer.param_groups[0]["params"] = list(model.parameters())\n')
    ],
    "each layer is sharded": [(OPTIMIZER + SHARD, LAYERS + SHARD + OPTIMIZER)],
}

WRONG = {
    "no shards": ([(SHARD, "")], "trains 676 numbers of 676"),
    "one layer is sharded later": (
        [(OPTIMIZER + SHARD, f"fully_shard(model[0], mesh=mesh)\n{OPTIMIZER}{SHARD}")],
        "2 of 4 parameters of the optimizer of rank 0 have no gradient",
    ),
    "a part of the shards": (
        [(OPTIMIZER + SHARD, f"{SHARD}{OPTIMIZER.replace('model.', 'model[0].')}")],
        "trains 272 numbers of 676",
    ),
}

"""Mends of exercise 5, right and wrong."""

REDUCE = "    dist.all_reduce(correct)\n"
PRINT = '    print(f"{correct.item()} of {len(images)} answers are correct")\n'
MINE = "mine = range(rank, len(images), world_size)"

RIGHT = {
    "rank 1 calls it too, and the barrier is left out": [
        (PRINT, f"{PRINT}else:\n{REDUCE}"),
        ("dist.barrier()  # the real program would train on\n", ""),
    ],
}

WRONG = {
    "no collective": (
        [(REDUCE, "")],
        "the answers of rank 0 alone; both ranks together have 27",
    ),
    "all images on each rank": (
        [(MINE, "mine = range(len(images))"), (REDUCE, "")],
        "Rank 0 evaluated 100 images and rank 1 100",
    ),
    "a number that is written in the program": (
        [(REDUCE + PRINT, '    print("27 of 100 answers are correct")\n')],
        "In a second run, with other images: Rank 0 printed 27 correct answers; both ranks",
    ),
}

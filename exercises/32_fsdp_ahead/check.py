"""The gather of a weight must be under way while the layer before it computes, and no other."""

from exercises.judge.judging import NUMBER, refuse, refuse_unfinished_messages
from exercises.judge.parts import (
    LAYERS,
    WEIGHT,
    WEIGHTS,
    first_step,
    plain_model,
    refuse_other_outputs,
    refuse_whole_weights,
    usually_held,
)
from exercises.judge.runner import FOUR_MEASURED, MEASURED
from exercises.sentences import say

SETUPS = [MEASURED, FOUR_MEASURED]


def check(*runs):
    for ranks in runs:
        refuse_other_outputs(ranks, plain_model())
        refuse_whole_weights(ranks, ahead=2)
        for rank in ranks:
            refuse_unfinished_messages(rank)
            refuse_waiting(rank)
    return say(
        "the outputs are those of one process. While a layer computes, the weight of the next one"
        " is under way: rank 0 of two waits for the first of {layers} gathers with nothing to"
        " compute. It holds {held:,} bytes of weights while a layer computes; its parts and two"
        " whole weights have {ahead:,}, all weights {whole:,}.",
        layers=len(LAYERS),
        ahead=WEIGHTS // 2 + 2 * WEIGHT,
        whole=WEIGHTS,
        held=usually_held(runs[0][0], "product"),
    )


def refuse_waiting(rank):
    """Refuse a forward pass in which a gather does not begin or end one product early."""
    began = []  # of each message of the forward pass, the products before it
    waits = []  # of each product, the waits before it
    waited = 0
    for event in first_step(rank):
        if event.kind == "message" and event.value.size > NUMBER:
            if event.value.in_backward:
                break
            began.append(event.value.products)
        elif event.kind == "wait" and event.value is not None:  # no other thread
            waited += 1
        elif event.kind == "computed" and event.value.name == "product":
            waits.append(waited)
    each = len(began) / len(LAYERS)  # messages that gather one weight
    for k in range(1, len(LAYERS)):
        begun = sum(products < k for products in began)
        if begun < (k + 1) * each:
            refuse(
                "Layer {layer} computes its matrix product before the gather of the next weight"
                " begins: the next layer waits for all of it.",
                layer=k,
            )
        if begun > (k + 1) * each:
            refuse(
                "When layer {layer} computes, {ahead:g} later weights are being gathered: one is"
                " enough.",
                layer=k,
                ahead=begun / each - k,
            )
        if waits[k - 1] > k * each:
            refuse(
                "Layer {layer} waits for the weight of the next one before it computes its own"
                " matrix product: start the gather with async_op=True, and wait later.",
                layer=k,
            )

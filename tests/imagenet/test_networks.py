"""torchvision's models, as ImageNet's recipes build them."""

import pytest
import torch

from imagenet import networks


@pytest.mark.parametrize(
    "name", ["resnet18", "googlenet", "inception_v3", "vit_b_16", "squeezenet1_0"]
)
def test_any_model_of_torchvision(name):
    """Each family that is peculiar: auxiliary classifiers, or an image size that is part of it.

    Only shapes are compared, so the tensors are on the device "meta" and have no values.
    """
    size = 96 if name == "inception_v3" else 32
    with torch.device("meta"):
        model = networks.build(name, size, classes=7)
        logits = model.train()(torch.empty(2, 3, size, size))
    assert logits.shape == (2, 7)
    logits.sum().backward()


def test_weight_decay_spares_batch_norm_and_biases():
    model = networks.build("resnet18", 64, classes=7)
    decayed, others = networks.decay_groups(model, 1e-4)
    assert (decayed["weight_decay"], others["weight_decay"]) == (1e-4, 0)
    spared = {id(p) for p in others["params"]}
    for name, module in model.named_modules():
        for kind, parameter in module.named_parameters(recurse=False):
            expected = isinstance(module, torch.nn.BatchNorm2d) or kind == "bias"
            assert (id(parameter) in spared) == expected, f"{name}.{kind}"
    assert len(decayed["params"]) + len(others["params"]) == len(list(model.parameters()))


def test_replaced_batch_norm_computes_the_same():
    class Other(torch.nn.BatchNorm2d):
        pass

    model = networks.build("resnet18", 64, classes=7).eval()
    pictures = torch.randn(2, 3, 64, 64)
    before = model(pictures)
    assert networks.replace_batch_norm(model, Other) is model
    assert {type(m) for m in model.modules() if isinstance(m, torch.nn.BatchNorm2d)} == {Other}
    assert torch.equal(model.eval()(pictures), before)

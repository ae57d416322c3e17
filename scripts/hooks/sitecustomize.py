"""Python imports this first in every process of a run that check.py or prove.py starts.

It installs the hooks on a module as soon as the script has imported it. It hides the environment's
own sitecustomize.
"""

import importlib.util
import os
import sys


class AfterImport:
    """An import hook: {module name: function to call with the module once it is imported}."""

    def __init__(self, functions):
        self.functions = functions

    def find_spec(self, name, path=None, target=None):
        function = self.functions.pop(name, None)
        if function is None:
            return None
        spec = importlib.util.find_spec(name)
        load = spec.loader.exec_module

        def load_and_call(module):
            load(module)
            function(module)

        spec.loader.exec_module = load_and_call
        return spec


functions = {}
if "PROVE" in os.environ:
    import prove_hooks

    functions["torch.nn"] = prove_hooks.install_nn
    functions["common.run"] = prove_hooks.install
if "CHECK" in os.environ:
    import check_hooks

    functions["torch"] = check_hooks.install
    functions["torch.distributed.fsdp"] = check_hooks.install_fsdp
    functions["horovod.torch"] = check_hooks.install_horovod
sys.meta_path.insert(0, AfterImport(functions))
# A process forked from one with torch has these modules already.
for name in [name for name in functions if name in sys.modules]:
    functions.pop(name)(sys.modules[name])

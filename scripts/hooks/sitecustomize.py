"""Python imports this first in every process of a run that check.py or prove.py starts.

It lets the hooks act on a module as soon as the script has imported it. A sitecustomize of the
environment is not read.
"""

import importlib.util
import os
import sys


class AfterImport:
    """An import hook: calls a function with each of some modules, once it has been imported."""

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
# In a process that was forked from one with torch.
for name in [name for name in functions if name in sys.modules]:
    functions.pop(name)(sys.modules[name])

"""Put a function of the checker in the place of one of torch."""

import functools
import importlib.util
import sys

missing = []  # names of functions that this torch does not have


def replace(owner, name, function):
    """Replace a function by function(the replaced one, its arguments), if it exists.

    Some are private to torch, and may move: what they would show is then not compared.
    """
    real = getattr(owner, name, None)
    if real is None:
        missing.append(f"{getattr(owner, '__name__', owner)}.{name}")
        return

    @functools.wraps(real)
    def wrapper(*args, **kwargs):
        return function(real, *args, **kwargs)

    setattr(owner, name, wrapper)


def after_import(name, function):
    """Call function(module) when the script imports this module, which may take a second."""

    class Finder:
        @staticmethod
        def find_spec(wanted, path=None, target=None):
            if wanted != name:
                return None
            sys.meta_path.remove(Finder)
            spec = importlib.util.find_spec(name)
            execute = spec.loader.exec_module

            def exec_module(module):
                execute(module)
                function(module)

            spec.loader.exec_module = exec_module
            return spec

    if name in sys.modules:
        function(sys.modules[name])
    else:
        sys.meta_path.insert(0, Finder)

"""A backend of torch.compile that runs checked passes on the graphs of AOTAutograd."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from torch import fx

from tcverify.compile_check.checking import CheckedPass, checked
from tcverify.compile_check.graph_facts import Examples, examples_of, publish_examples
from tcverify.errors import UsageError


class CheckedBackend:
    """A backend of torch.compile; made by `checked_backend`.

    Args:
        options: of AOTAutograd.

    Attributes:
        passes: the checked passes, in the order in which they run.
    """

    def __init__(
        self,
        passes: Sequence[CheckedPass],
        compiler: Callable[..., Any] | None,
        options: Mapping[str, Any] | None = None,
    ) -> None:
        self.passes = tuple(passes)
        self._options = dict(options or {})
        self._compiler = compiler
        self.__name__ = "tcverify"

    def __call__(self, gm: fx.GraphModule, example_inputs: Sequence[Any]) -> Any:
        from torch._dynamo.backends.common import aot_autograd

        examples = examples_of(example_inputs)

        def compiled(module: fx.GraphModule, inputs: Sequence[Any]) -> Any:
            return self._compiled(module, inputs, examples)

        return aot_autograd(fw_compiler=compiled, bw_compiler=compiled, **self._options)(gm, example_inputs)

    def _compiled(self, module: fx.GraphModule, inputs: Sequence[Any], examples: Examples) -> Any:
        from torch._functorch._aot_autograd.utils import make_boxed_func

        with publish_examples(examples):
            for one in self.passes:
                returned = one(module)
                module = module if returned is None else getattr(returned, "graph_module", returned)
        module.recompile()
        if self._compiler is None:
            return make_boxed_func(module.forward)
        return self._compiler(module, inputs)

    def report(self) -> str:
        """What has come of all passes so far, as text."""
        return "\n".join(str(one.report()) for one in self.passes)


def checked_backend(*passes: Any, compiler: str | Callable[..., Any] | None = None, **options: Any) -> CheckedBackend:
    """Create a backend of torch.compile that runs passes on the forward and backward graphs and verifies them there.

    Args:
        passes: results of `checked`, or passes, which are wrapped by it with the options.
        compiler: what compiles the graphs in the end: a function of a module and example inputs that returns a boxed function;
            "inductor"; or None, which runs them node by node.
        options: of `checked`.

    Raises:
        UsageError: there is no pass, or no such compiler.
    """
    if not passes:
        raise UsageError("checked_backend requires at least one pass", "for example checked_backend(MyPass())")
    of_autograd: dict[str, Any] = {}
    if isinstance(compiler, str):
        if compiler != "inductor":
            raise UsageError(f"there is no compiler '{compiler}'", "give 'inductor', or a function")
        from torch._inductor.compile_fx import compile_fx_inner

        compiler = compile_fx_inner
        from torch._inductor.decomposition import select_decomp_table

        of_autograd["decompositions"] = select_decomp_table()
    made = [one if isinstance(one, CheckedPass) else checked(one, **options) for one in passes]
    return CheckedBackend(made, compiler, of_autograd)


__all__ = ["CheckedBackend", "checked_backend"]

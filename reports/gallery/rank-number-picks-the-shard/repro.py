"""Reproduces a finding of tcverify. Run it where `tcverify run` found it, so that the pass can be imported."""

from tcverify import loads
from tcverify.replay import reproduce

# The original program as rank 0 runs it:
#
#   partial: [2, 2] = input
#   residual: [2, 2] = input
#   gain: [2] = input
#   all_reduce: [2, 2] = all_reduce(partial, 0, [1, 0])
#   add_rms_norm: [2, 2] = add_rms_norm(all_reduce, residual, gain, 1e-06)
#   return add_rms_norm

PASS = 'tests.mutants.sequence_parallel:RankNumberPicksShard'
OPTIONS = {}
CONTRACT = {
    'idempotent': True,
    'metadata': True,
}
KIND = 'wrong-value'
DOMAIN = 'float64'
DEEP = False
PASS_TIMEOUT = 20.0
PROGRAM = (
    '{"format":"tcverify-program","version":1,"mesh":{"world_size":2,"dims":[{"name":"tp","groups":[[1,0]'
    ']}]},"inputs":[{"name":"partial","shape":[2,2],"dtype":"float32","placements":[["tp","partial(sum)"]'
    '],"recipe":{"kind":"uniform","scale":1.0}},{"name":"residual","shape":[2,2],"dtype":"float32","place'
    'ments":[],"recipe":{"kind":"uniform","scale":1.0}},{"name":"gain","shape":[2],"dtype":"float32","pla'
    'cements":[],"recipe":{"kind":"uniform","scale":1.0}}],"graphs":[{"nodes":[{"name":"partial","op":"pl'
    'aceholder","target":"","args":[],"val":{"shape":[2,2],"stride":[2,1],"dtype":"float32","alias":0}},{'
    '"name":"residual","op":"placeholder","target":"","args":[],"val":{"shape":[2,2],"stride":[2,1],"dtyp'
    'e":"float32","alias":1}},{"name":"gain","op":"placeholder","target":"","args":[],"val":{"shape":[2],'
    '"stride":[1],"dtype":"float32","alias":2}},{"name":"all_reduce","op":"call_function","target":"tenso'
    'r_cast::all_reduce","args":[{"node":"partial"},{"rank_constant":"rank"},{"rank_constant":"tp"}],"val'
    '":{"shape":[2,2],"stride":[2,1],"dtype":"float32","alias":3}},{"name":"add_rms_norm","op":"call_func'
    'tion","target":"tensor_cast::add_rms_norm","args":[{"node":"all_reduce"},{"node":"residual"},{"node"'
    ':"gain"},1e-06],"val":{"shape":[2,2],"stride":[2,1],"dtype":"float32","alias":4}},{"name":"output","'
    'op":"output","target":"","args":[{"node":"add_rms_norm"}]}]}],"ranks":[{"graph":0,"constants":{"rank'
    '":0,"tp":[1,0]}},{"graph":0,"constants":{"rank":1,"tp":[1,0]}}],"seed":0,"labels":["layers=2","flat"'
    ',"two-groups","reordered","extra-outputs","attention","bias","carried-residual","fused-residual","ml'
    'p","over-dp","over-tp","reduced-read-later","region","rms_norm","view"]}'
)

if __name__ == "__main__":
    raise SystemExit(
        reproduce(
            loads(PROGRAM), PASS, OPTIONS, CONTRACT, KIND, domain=DOMAIN, deep=DEEP, pass_timeout=PASS_TIMEOUT
        )
    )

"""Reproduces a finding of tcverify. Run it where `tcverify run` found it, so that the pass can be imported."""

from tcverify import loads
from tcverify.replay import reproduce

# The original program as rank 0 runs it:
#
#   partial: [1, 2, 2] = input
#   gain: [2] = input
#   all_reduce: [1, 2, 2] = all_reduce(partial, 0, [0, 1])
#   add_rms_norm2 = add_rms_norm2(partial, all_reduce, gain, 1e-06)
#   getitem: [1, 2, 2] = add_rms_norm2[1]
#   return getitem

PASS = 'tests.mutants.sequence_parallel:VaryingAddendSliced'
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
    '{"format":"tcverify-program","version":1,"mesh":{"world_size":2,"dims":[{"name":"dp","groups":[[0,1]'
    ']}]},"inputs":[{"name":"partial","shape":[2,2,2],"dtype":"float32","placements":[["dp","shard(0)"]],'
    '"recipe":{"kind":"uniform","scale":1.0}},{"name":"gain","shape":[2],"dtype":"float32","placements":['
    '],"recipe":{"kind":"uniform","scale":1.0}}],"graphs":[{"nodes":[{"name":"partial","op":"placeholder"'
    ',"target":"","args":[],"val":{"shape":[1,2,2],"stride":[4,2,1],"dtype":"float32","alias":0}},{"name"'
    ':"gain","op":"placeholder","target":"","args":[],"val":{"shape":[2],"stride":[1],"dtype":"float32","'
    'alias":1}},{"name":"all_reduce","op":"call_function","target":"tensor_cast::all_reduce","args":[{"no'
    'de":"partial"},{"rank_constant":"rank"},{"rank_constant":"tp"}],"val":{"shape":[1,2,2],"stride":[4,2'
    ',1],"dtype":"float32","alias":2}},{"name":"add_rms_norm2","op":"call_function","target":"tensor_cast'
    '::add_rms_norm2","args":[{"node":"partial"},{"node":"all_reduce"},{"node":"gain"},1e-06],"val":{"tup'
    'le":[{"shape":[1,2,2],"stride":[4,2,1],"dtype":"float32","alias":3},{"shape":[1,2,2],"stride":[4,2,1'
    '],"dtype":"float32","alias":4}]}},{"name":"getitem","op":"call_function","target":"python::getitem",'
    '"args":[{"node":"add_rms_norm2"},1],"val":{"shape":[1,2,2],"stride":[4,2,1],"dtype":"float32","alias'
    '":4}},{"name":"output","op":"output","target":"","args":[{"node":"getitem"}]}]}],"ranks":[{"graph":0'
    ',"constants":{"rank":0,"tp":[0,1]}},{"graph":0,"constants":{"rank":1,"tp":[0,1]}}],"seed":0,"labels"'
    ':["layers=2","bsh","two-groups","reordered","extra-outputs","near-miss","tokens-as-ranks","carried-r'
    'esidual","fused-residual","in-place","over-dp","over-tp","region","rms_norm","unfused-residual","use'
    'r-gather","view"]}'
)

if __name__ == "__main__":
    raise SystemExit(
        reproduce(
            loads(PROGRAM), PASS, OPTIONS, CONTRACT, KIND, domain=DOMAIN, deep=DEEP, pass_timeout=PASS_TIMEOUT
        )
    )

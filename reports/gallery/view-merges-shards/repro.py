"""Reproduces a finding of tcverify. Run it where `tcverify run` found it, so that the pass can be imported."""

from tcverify import loads
from tcverify.replay import reproduce

# The original program as rank 0 runs it:
#
#   residual: [4, 2] = input
#   gain: [2] = input
#   v: [2, 2, 2] = input
#   all_reduce: [2, 2, 2] = all_reduce(v, 0, [0, 1])
#   view: [4, 2] = view(all_reduce, [4, 2])
#   add_rms_norm2 = add_rms_norm2(view, residual, gain, 1e-06)
#   getitem: [4, 2] = add_rms_norm2[1]
#   return getitem

PASS = 'tests.mutants.sequence_parallel:ViewMergesTokens'
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
    '{"format":"tcverify-program","version":1,"mesh":{"world_size":2,"dims":[{"name":"tp","groups":[[0,1]'
    ']}]},"inputs":[{"name":"residual","shape":[4,2],"dtype":"float32","placements":[],"recipe":{"kind":"'
    'uniform","scale":1.0}},{"name":"gain","shape":[2],"dtype":"float32","placements":[],"recipe":{"kind"'
    ':"uniform","scale":1.0}},{"name":"v","shape":[2,2,2],"dtype":"float32","placements":[["tp","partial('
    'sum)"]],"recipe":{"kind":"uniform","scale":1.0}}],"graphs":[{"nodes":[{"name":"residual","op":"place'
    'holder","target":"","args":[],"val":{"shape":[4,2],"stride":[2,1],"dtype":"float32","alias":0}},{"na'
    'me":"gain","op":"placeholder","target":"","args":[],"val":{"shape":[2],"stride":[1],"dtype":"float32'
    '","alias":1}},{"name":"v","op":"placeholder","target":"","args":[],"val":{"shape":[2,2,2],"stride":['
    '4,2,1],"dtype":"float32","alias":2}},{"name":"all_reduce","op":"call_function","target":"tensor_cast'
    '::all_reduce","args":[{"node":"v"},{"rank_constant":"rank"},{"rank_constant":"tp"}],"val":{"shape":['
    '2,2,2],"stride":[4,2,1],"dtype":"float32","alias":3}},{"name":"view","op":"call_function","target":"'
    'aten::view","args":[{"node":"all_reduce"},[4,2]],"val":{"shape":[4,2],"stride":[2,1],"dtype":"float3'
    '2","alias":3}},{"name":"add_rms_norm2","op":"call_function","target":"tensor_cast::add_rms_norm2","a'
    'rgs":[{"node":"view"},{"node":"residual"},{"node":"gain"},1e-06],"val":{"tuple":[{"shape":[4,2],"str'
    'ide":[2,1],"dtype":"float32","alias":4},{"shape":[4,2],"stride":[2,1],"dtype":"float32","alias":5}]}'
    '},{"name":"getitem","op":"call_function","target":"python::getitem","args":[{"node":"add_rms_norm2"}'
    ',1],"val":{"shape":[4,2],"stride":[2,1],"dtype":"float32","alias":5}},{"name":"output","op":"output"'
    ',"target":"","args":[{"node":"getitem"}]}]}],"ranks":[{"graph":0,"constants":{"rank":0,"tp":[0,1]}},'
    '{"graph":0,"constants":{"rank":1,"tp":[0,1]}}],"seed":0,"labels":["layers=2","bsh","two-groups","reo'
    'rdered","extra-outputs","near-miss","attention","bias","carried-residual","entry-norm","fused-residu'
    'al","mlp","over-tp","rewritten","rms_norm","scatter-gather","uneven-features","unfused-residual","vi'
    'ew"]}'
)

if __name__ == "__main__":
    raise SystemExit(
        reproduce(
            loads(PROGRAM), PASS, OPTIONS, CONTRACT, KIND, domain=DOMAIN, deep=DEEP, pass_timeout=PASS_TIMEOUT
        )
    )

"""Reproduces a finding of tcverify. Run it where `tcverify run` found it, so that the pass can be imported."""

from tcverify import loads
from tcverify.replay import reproduce

# The original program as rank 0 runs it:
#
#   x: [2, 2] = input
#   gain: [2] = input
#   v: [2, 2] = input
#   all_reduce: [2, 2] = all_reduce(v, 0, [0, 1])
#   add: [2, 2] = add.Tensor(all_reduce, x)
#   rms_norm: [2, 2] = rms_norm(add, gain, 1e-06)
#   return rms_norm

PASS = 'tests.mutants.sequence_parallel:ResidualAddedTwice'
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
    ']}]},"inputs":[{"name":"x","shape":[2,2],"dtype":"float32","placements":[],"recipe":{"kind":"uniform'
    '","scale":1.0}},{"name":"gain","shape":[2],"dtype":"float32","placements":[],"recipe":{"kind":"unifo'
    'rm","scale":1.0}},{"name":"v","shape":[2,2],"dtype":"float32","placements":[["tp","partial(sum)"]],"'
    'recipe":{"kind":"uniform","scale":1.0}}],"graphs":[{"nodes":[{"name":"x","op":"placeholder","target"'
    ':"","args":[],"val":{"shape":[2,2],"stride":[2,1],"dtype":"float32","alias":0}},{"name":"gain","op":'
    '"placeholder","target":"","args":[],"val":{"shape":[2],"stride":[1],"dtype":"float32","alias":1}},{"'
    'name":"v","op":"placeholder","target":"","args":[],"val":{"shape":[2,2],"stride":[2,1],"dtype":"floa'
    't32","alias":2}},{"name":"all_reduce","op":"call_function","target":"tensor_cast::all_reduce","args"'
    ':[{"node":"v"},{"rank_constant":"rank"},{"rank_constant":"tp"}],"val":{"shape":[2,2],"stride":[2,1],'
    '"dtype":"float32","alias":3}},{"name":"add","op":"call_function","target":"aten::add.Tensor","args":'
    '[{"node":"all_reduce"},{"node":"x"}],"val":{"shape":[2,2],"stride":[2,1],"dtype":"float32","alias":4'
    '}},{"name":"rms_norm","op":"call_function","target":"tensor_cast::rms_norm","args":[{"node":"add"},{'
    '"node":"gain"},1e-06],"val":{"shape":[2,2],"stride":[2,1],"dtype":"float32","alias":5}},{"name":"out'
    'put","op":"output","target":"","args":[{"node":"rms_norm"}]}]}],"ranks":[{"graph":0,"constants":{"ra'
    'nk":0,"tp":[0,1]}},{"graph":0,"constants":{"rank":1,"tp":[0,1]}}],"seed":0,"labels":["layers=3","bsh'
    '","two-groups","reordered","extra-outputs","attention","bias","carried-residual","fused-reduce","fus'
    'ed-residual","mlp","over-dp","over-tp","reduced-read-later","region","rms_norm","unfused-residual","'
    'view"]}'
)

if __name__ == "__main__":
    raise SystemExit(
        reproduce(
            loads(PROGRAM), PASS, OPTIONS, CONTRACT, KIND, domain=DOMAIN, deep=DEEP, pass_timeout=PASS_TIMEOUT
        )
    )

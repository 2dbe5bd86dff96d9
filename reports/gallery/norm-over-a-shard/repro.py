"""Reproduces a finding of tcverify. Run it where `tcverify run` found it, so that the pass can be imported."""

from tcverify import loads
from tcverify.replay import reproduce

# The original program as rank 0 runs it:
#
#   gain: [4] = input
#   v: [1, 1, 1, 2] = input
#   all_gather: [1, 1, 1, 4] = all_gather(v, 3, 0, [0, 1])
#   rms_norm: [1, 1, 1, 4] = rms_norm(all_gather, gain, 1e-06)
#   return rms_norm

PASS = 'tests.mutants.foreign:NormOverShard'
OPTIONS = {}
CONTRACT = {
    'metadata': True,
}
KIND = 'wrong-value'
DOMAIN = 'float64'
DEEP = False
PASS_TIMEOUT = 20.0
PROGRAM = (
    '{"format":"tcverify-program","version":1,"mesh":{"world_size":2,"dims":[{"name":"tp","groups":[[0,1]'
    ']}]},"inputs":[{"name":"gain","shape":[4],"dtype":"float32","placements":[],"recipe":{"kind":"unifor'
    'm","scale":1.0}},{"name":"v","shape":[1,1,1,2],"dtype":"float32","placements":[["tp","varying"]],"re'
    'cipe":{"kind":"uniform","scale":1.0}}],"graphs":[{"nodes":[{"name":"gain","op":"placeholder","target'
    '":"","args":[],"val":{"shape":[4],"stride":[1],"dtype":"float32","alias":0}},{"name":"v","op":"place'
    'holder","target":"","args":[],"val":{"shape":[1,1,1,2],"stride":[2,2,2,1],"dtype":"float32","alias":'
    '1}},{"name":"all_gather","op":"call_function","target":"tensor_cast::all_gather","args":[{"node":"v"'
    '},3,{"rank_constant":"rank"},{"rank_constant":"tp"}],"val":{"shape":[1,1,1,4],"stride":[4,4,4,1],"dt'
    'ype":"float32","alias":2}},{"name":"rms_norm","op":"call_function","target":"tensor_cast::rms_norm",'
    '"args":[{"node":"all_gather"},{"node":"gain"},1e-06],"val":{"shape":[1,1,1,4],"stride":[4,4,4,1],"dt'
    'ype":"float32","alias":3}},{"name":"output","op":"output","target":"","args":[{"node":"rms_norm"}]}]'
    '}],"ranks":[{"graph":0,"constants":{"rank":0,"tp":[0,1]}},{"graph":0,"constants":{"rank":1,"tp":[0,1'
    ']}}],"seed":0,"labels":["layers=0","bsh","extra-outputs","wild","all-gather","all-reduce","fused-nor'
    'm","matmul","norm","reduce-scatter","transpose","unary","view"]}'
)

if __name__ == "__main__":
    raise SystemExit(
        reproduce(
            loads(PROGRAM), PASS, OPTIONS, CONTRACT, KIND, domain=DOMAIN, deep=DEEP, pass_timeout=PASS_TIMEOUT
        )
    )

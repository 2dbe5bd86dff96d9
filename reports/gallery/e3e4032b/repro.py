"""Reproduces a finding of tcverify. Run it where `tcverify run` found it, so that the pass can be imported."""

from tcverify import loads
from tcverify.replay import reproduce

# The original program as rank 0 runs it:
#
#   partial: [2, 2] = input
#   gain: [2] = input
#   v: [1, 2] = input
#   all_reduce: [2, 2] = all_reduce(partial, 0, [0, 1])
#   add: [1, 2] = add.Tensor(v, v)
#   rms_norm: [2, 2] = rms_norm(all_reduce, gain, 1e-06)
#   return (add, rms_norm)

PASS = 'tcverify.passes.sequence_parallel:SequenceParallel+tests.mutants.multistream:TokenSharedByCollectives'
OPTIONS = {}
CONTRACT = {
    'idempotent': False,
    'metadata': True,
    'identity': False,
    'schedule': True,
    'overlap': False,
    'boundary': 'strict',
    'inputs': 'ready',
}
KIND = 'race'
DEEP = False
PASS_TIMEOUT = 20.0
PROGRAM = (
    '{"format":"tcverify-program","version":1,"mesh":{"world_size":2,"dims":[{"name":"tp","groups":[[0,1]'
    ']}]},"inputs":[{"name":"partial","shape":[2,2],"dtype":"float32","placements":[["tp","partial(sum)"]'
    '],"recipe":{"kind":"uniform","scale":1.0}},{"name":"gain","shape":[2],"dtype":"float32","placements"'
    ':[],"recipe":{"kind":"uniform","scale":1.0}},{"name":"v","shape":[1,2],"dtype":"float32","placements'
    '":[],"recipe":{"kind":"uniform","scale":1.0}}],"graphs":[{"nodes":[{"name":"partial","op":"placehold'
    'er","target":"","args":[],"val":{"shape":[2,2],"stride":[2,1],"dtype":"float32","alias":0}},{"name":'
    '"gain","op":"placeholder","target":"","args":[],"val":{"shape":[2],"stride":[1],"dtype":"float32","a'
    'lias":1}},{"name":"v","op":"placeholder","target":"","args":[],"val":{"shape":[1,2],"stride":[2,1],"'
    'dtype":"float32","alias":2}},{"name":"all_reduce","op":"call_function","target":"tensor_cast::all_re'
    'duce","args":[{"node":"partial"},{"rank_constant":"rank"},{"rank_constant":"tp"}],"val":{"shape":[2,'
    '2],"stride":[2,1],"dtype":"float32","alias":3}},{"name":"add","op":"call_function","target":"aten::a'
    'dd.Tensor","args":[{"node":"v"},{"node":"v"}],"val":{"shape":[1,2],"stride":[2,1],"dtype":"float32",'
    '"alias":4}},{"name":"rms_norm","op":"call_function","target":"tensor_cast::rms_norm","args":[{"node"'
    ':"all_reduce"},{"node":"gain"},1e-06],"val":{"shape":[2,2],"stride":[2,1],"dtype":"float32","alias":'
    '5}},{"name":"output","op":"output","target":"","args":[{"tuple":[{"node":"add"},{"node":"rms_norm"}]'
    '}]}]}],"ranks":[{"graph":0,"constants":{"rank":0,"tp":[0,1]}},{"graph":0,"constants":{"rank":1,"tp":'
    '[0,1]}}],"seed":0,"labels":["layers=2","sbh","bf16","mixed-dtypes","few-tokens","extra-outputs","att'
    'ention","bias","carried-residual","cast","fused-reduce","fused-residual","mlp","over-tp","region","r'
    'ms_norm","transpose","unfused-residual","view","timed"],"streams":{"compute":[0],"comm":[1],"sync_ov'
    'erhead_s":0.0,"device":"a100-sxm-80gb"}}'
)

if __name__ == "__main__":
    raise SystemExit(
        reproduce(loads(PROGRAM), PASS, OPTIONS, CONTRACT, KIND, deep=DEEP, pass_timeout=PASS_TIMEOUT)
    )

# the same on the host backend, in threads of one process
import torch, threading, tileflux, time
from tileflux import GemmConfig
gs=tileflux.local_groups(2)
res=[None,None]
X=torch.randn(4000,512); w=torch.randn(64,512)
bad=[0]
def run(r):
    for call in range(20):
        if r==1: time.sleep(.02)
        y,G=tileflux.ag_gemm(X[2000*r:2000*r+2000]+call,w[:0],group=gs[r],strategy="fused",return_gathered=True)
        if not torch.equal(G,X+call): bad[0]+=1
ts=[threading.Thread(target=run,args=(r,)) for r in range(2)]
[t.start() for t in ts]; [t.join() for t in ts]
print("host backend: wrong gathered", bad[0],"of 40")

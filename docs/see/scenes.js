// What the page and each scene say, [English, Chinese]. The runs are in runs.js.
const PAGE = {
  "title": ["See it happen: what each rank does, step by step", "看它运行：每个 rank 每一步在做什么"],
  "intro": ["Real programs, recorded on two to four processes with tensors small enough to read. Press ▶ or the right arrow key. Before each frame, guess what every rank will do. The milliseconds are each rank's own.", "这里是真实的程序，在两到四个进程上录制，张量小到可以逐个读出来。点 ▶ 或按右方向键前进。每走一步之前，先猜猜各个 rank 会做什么。毫秒数是各 rank 自己的时间。"],
  "run": ["Run it yourself:", "自己运行："],
  "fit": {
    "title": ["Does it fit?", "显存放得下吗？"],
    "about": ["Memory of one GPU at the fullest moment of a training step, in GB: a model of 32 equal blocks, Adam, bf16 with weights in float32, 8 GPUs per machine. A tenth stays free for what is not counted. It is the model of tools/fit.py.", "训练步中显存占用最高的时刻，一块 GPU 上各部分的大小（GB）。模型由 32 个相同的 block 组成，使用 Adam 和 bf16（权重仍为 float32），每台机器 8 块 GPU，另留一成显存给未计入的部分。计算方法与 tools/fit.py 相同。"],
    "head": [["way", "方式"], ["weights", "权重"], ["gradients", "梯度"], ["optimizer", "优化器"], ["activations", "激活值"], ["temporary", "临时"], ["sum", "合计"], ["fits", "放得下"]]
  },
  "scale": {
    "title": ["How does it scale?", "增加 GPU 能快多少？"],
    "about": ["Speed of each GPU beside one GPU, and of all together, without and with perfect overlap of communication and computation; 8 GPUs per machine. It is the model of tools/plan.py, which the book compares with published results.", "每块 GPU 相对于单块 GPU 的速度，以及全部 GPU 合计的加速比：分别按通信与计算完全不重叠和完全重叠来算，每台机器 8 块 GPU。计算方法与 tools/plan.py 相同，教程中与公开结果做过对照。"],
    "head": [["GPUs", "GPU 数"], ["each, no overlap", "每块，无重叠"], ["each, overlap", "每块，完全重叠"], ["all, no overlap", "合计，无重叠"], ["all, overlap", "合计，完全重叠"]]
  }
};

const SCENES = {
  "step": {
    "ranks": 2, "functions": ["train"],
    "title": ["One step of DDP", "DDP 的一步"],
    "question": ["What happens in one training step of DDP?", "DDP 的一个训练步里发生了什么？"],
    "about": ["Two ranks have the same model and different images. Watch the gradients during the backward pass, and the weights after the step.", "两个 rank 的模型相同，图像不同。留意反向传播期间的梯度，以及这一步之后的权重。"],
    "questions": {
      "no_sync": ["What does no_sync() change?", "no_sync() 改变了什么？"],
      "model": ["What if the loop calls model, not ddp?", "如果循环里调用的是 model，不是 ddp 呢？"],
      "slow": ["What if one rank is slow?", "有一个 rank 很慢会怎样？"],
      "hang": ["Why does this training hang?", "这个训练为什么会卡住？"]
    },
    "options": {
      "ddp": ["ddp(images)", "ddp(images)"],
      "no_sync": ["no_sync()", "no_sync()"],
      "model": ["model(images)", "model(images)"],
      "slow": ["one slow rank", "一个慢的 rank"],
      "hang": ["if rank == 0", "if rank == 0"]
    },
    "watch": ["images", "weight1", "weight2", "loss", "gradient1", "gradient2"],
    "labels": {"images": ["images", "图像"], "weight1": ["weights of layer 1", "第 1 层权重"], "weight2": ["weights of layer 2", "第 2 层权重"], "loss": ["loss", "损失"], "gradient1": ["gradient of layer 1", "第 1 层梯度"], "gradient2": ["gradient of layer 2", "第 2 层梯度"]},
    "names": {"0.weight": ["layer 1", "第 1 层"], "1.weight": ["layer 2", "第 2 层"]},
    "notes": [
      ["@hang", "Rank 0 waits in a barrier that rank 1 never calls: rank 1 is already in the all-reduce of its next gradients. Nothing moves until the timeout (by default 30 minutes with gloo, 10 with NCCL). Calls are counted in each process group: those with one number must be the same on all ranks. launch/why_hang.py asks the ranks, and says:", "rank 0 在等一个 barrier，而 rank 1 不会调用它：rank 1 已经在做下一步梯度的 all-reduce。在超时（默认 gloo 30 分钟、NCCL 10 分钟）之前，谁也动不了。调用在每个进程组里按次序编号，同一个编号在所有 rank 上必须是同一个操作。launch/why_hang.py 询问各个 rank，给出："],
      ["if rank == 0", "Only rank 0 enters the next line.", "只有 rank 0 会进入下一行。"],
      ["dist.barrier", "A collective. The other rank does not call it: it goes on.", "集合通信操作。另一个 rank 没有调用，继续往下走。"],
      ["optimizer = ", "Both ranks begin with the same weights: DDP has sent those of rank 0 to all.", "两个 rank 的初始权重相同：DDP 已把 rank 0 的权重发给所有 rank。"],
      ["images, targets", "Each rank takes other images.", "每个 rank 取不同的图像。"],
      ["time.sleep", "Rank 1 needs 0.4 s for its images, rank 0 nothing. Where will rank 0 wait?", "rank 1 读图像要 0.4 秒，rank 0 不花时间。rank 0 会在哪里等待？"],
      ["with ddp.no_sync", "no_sync() tells DDP not to average the gradients of this backward pass. It is meant for all micro-batches of a step but the last; here it is used in each step.", "no_sync() 让 DDP 在这次反向传播中不对梯度求平均。它用于一个训练步中除最后一个之外的 micro-batch；这里每一步都用了。"],
      ["outputs = model", "model(images), not ddp(images): the outputs are those of ddp(images), with no error and no warning.", "这里用的是 model(images)：输出与 ddp(images) 的相同，没有错误，也没有警告。"],
      ["outputs = ddp", "The forward pass exchanges neither images nor activations: each rank computes on its own.", "前向传播既不交换图像，也不交换激活值，每个 rank 只计算自己的。"],
      ["loss = ", "Each rank has the loss of its own images.", "每个 rank 得到自己的图像的损失。"],
      ["loss.backward", "The backward pass begins at the last layer.", "反向传播从最后一层开始。"],
      ["@gradient", "A gradient of this rank's own images is ready.", "由本 rank 自己的图像得到的一个梯度算好了。"],
      ["@bucket 0.weight", "The last bucket is full, and its all-reduce starts. Nothing is left to compute beside it.", "最后一个 bucket 的梯度已到齐，启动它的 all-reduce。这时已经没有可以同时进行的计算。"],
      ["@bucket", "A bucket of gradients is full. Its all-reduce, which gives each rank the mean, starts now, while the backward pass goes on with the layer before.", "一个 bucket 的梯度已到齐，立即启动它的 all-reduce（让每个 rank 都得到平均值），而反向传播继续计算前一层。"],
      ["@wait dist.barrier", "This rank waits for the other, which does not call it.", "这个 rank 在等另一个 rank，而对方不会调用它。"],
      ["@wait", "A rank that comes early waits here, until the slowest has sent its gradients too: a step takes as long as its slowest rank.", "先到的 rank 在这里等最慢的 rank 也发出梯度，所以一个训练步的时间取决于最慢的 rank。", "slow"],
      ["@wait", "With gloo, backward() returns only after all buckets are averaged. (With NCCL Python goes on, and the GPU waits.)", "使用 gloo 时，所有 bucket 都平均完，backward() 才返回。（使用 NCCL 时，Python 会继续执行，由 GPU 等待。）"],
      ["@done", "Both ranks now have the same gradients: the mean over the images of both.", "现在两个 rank 的梯度相同，都是两边图像梯度的平均值。"],
      ["optimizer.step", "The gradients are equal, so the new weights are equal.", "梯度相同，更新后的权重也相同。", "ddp"],
      ["optimizer.step", "The gradients are equal, so the new weights are equal.", "梯度相同，更新后的权重也相同。", "slow"],
      ["optimizer.step", "The gradients are equal, so the new weights are equal.", "梯度相同，更新后的权重也相同。", "hang"],
      ["optimizer.step", "DDP has not seen the forward pass, so it has averaged nothing. The gradients differ, and so will the weights: from now on each rank trains another model.", "DDP 没有看到前向传播，所以没有求平均。梯度不同，权重也会不同，从此每个 rank 训练的是不同的模型。", "model"],
      ["optimizer.step", "The gradients differ, so the weights will differ: from now on each rank trains another model.", "梯度不同，权重也会不同，从此每个 rank 训练的是不同的模型。"],
      ["@end with", "The block of no_sync() ends. Each rank has only its own gradients.", "no_sync() 的代码块结束。每个 rank 只有自己的梯度。"],
      ["@end", "Both steps are done.", "两个训练步都完成了。"],
      ["@return", "Compare the weights of the two ranks.", "比较一下两个 rank 的权重。"],
      ["for _ in", "A training step begins.", "一个训练步开始。"],
      ["zero_grad", "Gradients of the step before, if any, are removed.", "清除上一步的梯度（如果有）。"]
    ]
  },
  "ring": {
    "ranks": 4, "functions": ["ring_all_reduce"],
    "title": ["Ring all-reduce", "环形 all-reduce"],
    "question": ["How does a ring all-reduce work, and why does each rank send 2 (n - 1) messages?", "环形 all-reduce 如何工作？为什么每个 rank 要发送 2 (n - 1) 条消息？"],
    "about": ["Each of four ranks has four numbers, and wants the four sums. It sends only to the rank after it, one piece at a time.", "四个 rank 各有四个数，目标是得到四个和。每个 rank 只向下一个 rank 发送，一次一块。"],
    "options": {},
    "watch": ["tensor", "step", "received"],
    "labels": {"tensor": ["tensor", "张量"], "step": ["round", "轮"], "received": ["received", "收到"]},
    "notes": [
      ["pieces = list", "Each rank writes its numbers in another decimal place, so a sum shows who is in it: finished sums are 1111, 2222, 3333 and 4444.", "各 rank 的数写在不同的数位上，所以从和里能看出有谁：算完的和是 1111、2222、3333 和 4444。"],
      ["@end reduce-scatter", "Each rank now has one finished sum, of another piece.", "现在每个 rank 各有一块算完的和，各不相同。"],
      ["@end all-gather", "All ranks have all the sums.", "所有 rank 都有了全部的和。"],
      ["reduce-scatter", "A round of the first half: each rank adds what it receives to its own piece, and passes the sum on in the next round. To pass all n ranks, a piece is sent n - 1 times.", "前半部分的一轮：每个 rank 把收到的数加到自己的那一块上，下一轮再把和传下去。一块要经过全部 n 个 rank，需要传 n - 1 次。"],
      ["all-gather", "A round of the second half: the finished sums go one rank further, and replace what is there. Again n - 1 rounds.", "后半部分的一轮：算完的和传给下一个 rank，覆盖那里的数。同样需要 n - 1 轮。"],
      ["@send", "Every rank sends one piece to the next at the same time, so all links work at once.", "所有 rank 同时向下一个 rank 发送一块，所有链路都在工作。"],
      ["@receive", "Each waits for the piece of the rank before it.", "每个 rank 等待上一个 rank 的那一块。"],
      ["@done", "The piece has arrived.", "那一块到了。"],
      ["+= received", "What has arrived is added. This piece is the next to be sent.", "收到的数加进这一块。下一轮发送的就是这一块。"],
      ["copy_(received)", "A finished sum replaces the piece.", "用算完的和覆盖这一块。"],
      ["@return", "3 + 3 = 2 (n - 1) messages: each rank has sent six pieces of a quarter of the tensor: 1.5 times its size. With n ranks it is 2 (n - 1) / n times, always less than 2.", "3 + 3 = 2 (n - 1) 条消息：每个 rank 发送了六块，每块是张量的四分之一，共为张量的 1.5 倍。n 个 rank 时是 2 (n - 1) / n 倍，始终小于 2。"]
    ]
  },
  "sampler": {
    "ranks": 2, "functions": ["train", "evaluate"],
    "title": ["Who reads what", "谁读哪些图像"],
    "question": ["Which rank reads which image?", "哪个 rank 读哪些图像？"],
    "about": ["Seven images, 0 to 6, for two ranks: seven is no multiple of two.", "七张图像（0 到 6）分给两个 rank，而七不是二的倍数。"],
    "questions": {"without": ["What if set_epoch() is forgotten?", "忘了调用 set_epoch() 会怎样？"]},
    "options": {"set_epoch": ["set_epoch()", "set_epoch()"], "without": ["forgotten", "忘了调用"]},
   
    "watch": ["epoch", "share", "batch", "read", "count"],
    "labels": {"epoch": ["epoch", "epoch"], "share": ["share of this rank", "本 rank 的份额"], "batch": ["batch", "batch"], "read": ["read so far", "已读"], "count": ["images counted", "计入的图像数"]},
    "notes": [
      ["sampler = ", "All ranks shuffle the indices with the same seed; rank r then takes every second one, from r on.", "所有 rank 用同一个种子打乱下标，rank r 从第 r 个开始，每隔一个取一个。"],
      ["loader = ", "Look at the shares: together they hold one image twice, so that both ranks have equally many.", "看两边的份额：有一张图像出现了两次，这样两个 rank 的数量才相等。"],
      ["@end for epoch", "Without set_epoch() the seed stays the same: both epochs had the same order, and the same batches.", "没有 set_epoch()，种子不变：两个 epoch 的顺序和 batch 完全相同。", "without"],
      ["@end for epoch", "The second epoch had another order, and repeated another image.", "第二个 epoch 的顺序不同，重复的图像也不同。"],
      ["@end for batch", "Both ranks end at the same batch. Otherwise one would wait for the other in DDP, for ever.", "两个 rank 在同一个 batch 结束。否则在 DDP 中，一个会一直等另一个。"],
      ["@end for image", "All images of this rank are counted.", "本 rank 的图像都已计数。"],
      ["for epoch", "An epoch begins.", "一个 epoch 开始。"],
      ["set_epoch", "set_epoch() adds the epoch to the seed of the shuffle. Look at the share in the next frame.", "set_epoch() 把 epoch 加到打乱用的种子上。看下一帧的份额。"],
      ["        read = []", "The shares of this epoch.", "本 epoch 的份额。"],
      ["for batch", "Each rank reads its share.", "每个 rank 读自己的份额。"],
      ["for image in", "Evaluation by hand: rank r takes r, r + 2, ... No image is repeated, so the shares may differ by one.", "手写的评估：rank r 取 r、r + 2……没有重复的图像，所以两边的数量可以差一个。"],
      ["read.append", "Every image is read once, by one rank.", "每张图像只被一个 rank 读一次。"],
      ["read = []", "Now an evaluation, which must count each image once.", "接下来是评估，每张图像只能计一次。"],
      ["count = ", "The count of each rank differs.", "两个 rank 的计数不同。"],
      ["all_reduce", "The counts are summed, as sums of losses and correct answers would be. The mean of the ranks' means would be wrong: rank 1 has fewer images.", "把计数相加；损失之和、预测正确的数量也应这样相加。对各 rank 的平均值再取平均是错的，因为 rank 1 的图像较少。"],
      ["@wait", "Each waits until all have called it.", "等所有 rank 都调用。"],
      ["@done", "Seven images, each counted once.", "七张图像，每张计一次。"]
    ]
  },
  "fsdp": {
    "ranks": 2, "functions": ["train", "forward"],
    "names": {"1": ["block 1", "block 1"], "2": ["block 2", "block 2"], "3": ["block 3", "block 3"]},
    "title": ["Where the model is in FSDP", "FSDP 中模型在哪里"],
    "question": ["Where is the model in FSDP?", "FSDP 中模型在哪里？"],
    "about": ["Three blocks of four weights, on two ranks. A rank keeps half of each block. Watch a block before, during and after its turn.", "三个 block，各有四个权重，分在两个 rank 上，每个 rank 只保存每个 block 的一半。看一个 block 在轮到它之前、之时和之后的样子。"],
    "options": {},
    "watch": ["images", "x", "block1", "block2", "block3", "bytes", "whole", "gradient1", "gradient2", "gradient3"],
    "bars": {"bytes": 48},
    "labels": {"images": ["images", "图像"], "x": ["activation", "激活值"], "block1": ["block 1", "block 1"], "block2": ["block 2", "block 2"], "block3": ["block 3", "block 3"], "bytes": ["bytes of shards and whole blocks, of 48 in DDP", "分片与完整 block 的字节数（DDP 为 48）"], "whole": ["gradient of the whole block", "整个 block 的梯度"], "gradient1": ["gradient of block 1", "block 1 的梯度"], "gradient2": ["gradient of block 2", "block 2 的梯度"], "gradient3": ["gradient of block 3", "block 3 的梯度"]},
    "notes": [
      ["optimizer = ", "Each rank holds one of the two rows of each block. The optimizer has only these to update.", "每个 rank 保存每个 block 两行中的一行。优化器要更新的也只有这些。"],
      ["loss = model", "The forward pass begins.", "前向传播开始。"],
      ["@end", "The forward pass is over: all blocks are shards.", "前向传播结束，所有 block 都是分片。"],
      ["@return", "Only its own rows have changed. Gradients and optimizer state are divided like the weights; activations are not.", "只有自己的行变了。梯度和优化器状态像权重一样分片，激活值则不分片。"],
      ["for block", "All blocks are shards. The next one is gathered just before it computes.", "所有 block 都是分片。下一个 block 在计算之前才被收集完整。"],
      ["x = block", "This block computes next. Before it does, the ranks gather its whole weights.", "接下来轮到这个 block 计算。计算之前，各 rank 收集完整的权重。"],
      ["loss.backward", "The backward pass goes from the last block to the first, and gathers each block again.", "反向传播从最后一个 block 到第一个，并再次收集每个 block。"],
      ["@wait all_gather loss.backward", "The backward pass needs each block whole again. FSDP asks for the next block before it computes the gradient of this one: on GPUs the message travels beside the computation.", "反向传播也需要完整的 block。FSDP 在计算当前 block 的梯度之前就预取下一个；在 GPU 上，通信与计算同时进行。"],
      ["@wait all_gather", "All-gather: each rank gives its half of the block.", "all-gather：每个 rank 交出自己那一半。"],
      ["@wait reduce_scatter", "Reduce-scatter: the gradient is averaged over the ranks, and each keeps its row. The whole block is already freed.", "reduce-scatter：梯度在各 rank 之间求平均，各留下自己的一行。完整的 block 已经释放。"],
      ["@done reduce_scatter", "Each rank has its row of the averaged gradient.", "每个 rank 得到平均梯度中自己的一行。"],
      ["@done loss.backward", "The halves have arrived in a buffer, which the bar leaves out. The block is built from it when its turn comes.", "两半已到，放在缓冲区里（条形中未计入）；轮到这个 block 时再由它拼成完整的 block。"],
      ["@done", "The halves of both ranks are here.", "两个 rank 的两半都到齐了。"],
      ["@compute", "The block that computes is whole on both ranks; the others are shards.", "正在计算的 block 在两个 rank 上都是完整的，其余仍是分片。"],
      ["@gradient", "The gradient of a whole block, from this rank's image alone.", "整个 block 的梯度，只来自本 rank 的图像。"],
      ["optimizer.step", "Each rank has the gradient of its own row, averaged over both ranks, and updates this row only.", "每个 rank 得到自己那一行的梯度（已在两个 rank 上平均），只更新这一行。"]
    ]
  },
  "syncbn": {
    "ranks": 2, "functions": ["batch_norm", "sync_batch_norm"],
    "title": ["What SyncBN synchronizes", "SyncBN 同步什么"],
    "question": ["What does SyncBN synchronize?", "SyncBN 同步的是什么？"],
    "about": ["Two images of two channels on each rank: first ordinary batch norm, then batch norm over all ranks.", "每个 rank 有两张图像，各两个通道。先做普通的 BN，再做跨所有 rank 的 BN。"],
    "options": {},
    "watch": ["images", "mean", "variance", "sums", "squares", "outputs"],
    "labels": {"images": ["images, a row each", "图像（每行一张）"], "mean": ["mean of each channel", "各通道均值"], "variance": ["variance", "方差"], "sums": ["sums, and count", "各通道之和与图像数"], "squares": ["sums of squares", "平方和"], "outputs": ["outputs", "输出"]},
    "notes": [
      ["mean = images.mean", "Ordinary batch norm: the mean of this rank's two images.", "普通 BN：只对本 rank 的两张图像求均值。"],
      ["variance = (images", "And the variance around it.", "再求围绕它的方差。"],
      ["outputs = ", "Normalize with the mean and the variance.", "用均值和方差归一化。"],
      ["@return", "Compare the outputs of the two ranks, and their images: what has become of the difference between the ranks?", "比较两个 rank 的输出和图像：rank 之间的差别还在吗？"],
      ["sums = torch", "SyncBN: sums and the number of images, not means: ranks may have different numbers of images.", "SyncBN：传递的是和与图像数，不是均值，因为各 rank 的图像数可以不同。"],
      ["all_reduce(sums)", "First message: the sums of the ranks are added.", "第一次通信：把所有 rank 的和相加。"],
      ["mean, count", "The same mean on both ranks.", "两个 rank 得到相同的均值。"],
      ["squares = ", "Distances from the common mean.", "与共同均值的距离。"],
      ["all_reduce(squares)", "Second message: the sums of squares.", "第二次通信：平方和。"],
      ["variance = squares", "The same variance on both ranks.", "两个 rank 得到相同的方差。"],
      ["@wait", "Each waits until all have called it. This program waits twice; torch.nn.SyncBatchNorm once in the forward pass and once in the backward pass, in each layer.", "等所有 rank 都调用。本程序等两次；torch.nn.SyncBatchNorm 的每一层在前向传播中等一次，反向传播中等一次。"],
      ["@done", "Both have the sum.", "两个 rank 都有了总和。"]
    ]
  },
  "machine": {
    "ranks": 2, "functions": ["main", "train_epoch"],
    "flags": "--dummy 32 --image-size 16 --arch mnist_net --batch-size 8 --epochs 1 --lr 16 --warmup-epochs 0 --workers 0 --eval-every 0 --checkpoint-every 2 --resume",
    "run": "torchrun --nnodes=1:2 --nproc-per-node=1 --max-restarts=3 --rdzv-backend=c10d --rdzv-endpoint=HOST:29400 06_imagenet.py",
    "names": {"load": ["the search for checkpoints", "查找检查点"], "gradients": ["the all-reduce of the gradients", "梯度的 all-reduce"]},
    "title": ["A machine dies", "一台机器宕机"],
    "question": ["What happens when a machine dies?", "一台机器宕机时会发生什么？"],
    "about": ["06_imagenet.py on two machines of one process each, four training steps of eight images. In the fourth, all processes of the machine of rank 1 are killed. It was recorded on one computer, where two torchruns stand for the machines. The program shown is that of commit d284ab0.", "06_imagenet.py 运行在两台机器上，每台一个进程，共四个训练步，每步八张图像。第四步时，rank 1 所在机器上的进程全部被杀死。录制在一台电脑上，由两个 torchrun 充当两台机器。显示的程序来自提交 d284ab0。"],
    "options": {},
    "watch": ["world", "step", "micro", "images", "bias"],
    "labels": {"world": ["world size", "进程总数（world size）"], "step": ["steps done", "已完成的步数"], "micro": ["micro-batches per step", "每步的 micro-batch 数"], "images": ["its images, by number", "它的图像（编号）"], "bias": ["three of the weights", "三个权重"]},
    "notes": [
      ["@started", "torchrun has started this process.", "torchrun 启动了这个进程。"],
      ["@restarted", "torchrun has waited for the lost machine or another one (some seconds here; the limits are set short), and now starts 06 again, alone: --nnodes=1:2 allows one machine, and --max-restarts the restart. The store, where torchruns meet, was on neither machine.", "torchrun 等待失联的机器或其他机器加入（这里的时限设得很短，只等几秒），之后独自重新启动 06：--nnodes=1:2 允许只有一台机器，--max-restarts 允许重启。各个 torchrun 会合用的 store 不在这两台机器上。"],
      ["setup_distributed", "The processes of this start meet. How many there are is known only now: see the world size of the next frame.", "本次启动的进程在此会合。到这时才知道一共有几个：看下一帧的进程总数。"],
      ["checkpoints.load", "Rank 0 looks for the newest undamaged checkpoint.", "rank 0 寻找最新的完好检查点。"],
      ["@wait checkpoints.load", "All look for the newest undamaged checkpoint on any machine. Is there one?", "所有进程一起寻找各台机器上最新的完好检查点。有没有呢？"],
      ["@done checkpoints.load", "There is none: both begin with step 1.", "没有检查点，两个进程都从第 1 步开始。"],
      ["load_state_dict", "The checkpoint of step 2: weights, optimizer state, number of the step. Step 3 was done, but not saved: it will be repeated.", "加载第 2 步的检查点：权重、优化器状态和步数。第 3 步做过了，但没有保存，要重做。"],
      ["votes.cast", "A training step begins. Each rank says whether a signal asks it to stop; the vote travels while the step computes.", "一个训练步开始。每个 rank 说明是否有信号要求停止；计算的同时，投票在传递。"],
      ["next(batches)", "A rank reads four of the eight images of this step; one rank alone does so twice.", "一个 rank 读取本步八张图像中的四张；只有一个 rank 时，分两次读完。"],
      ["@wait backward", "The ranks average their gradients: each needs those of the other.", "各 rank 对梯度求平均，需要对方的梯度。"],
      ["@done backward", "The gradients of all ranks are here.", "所有 rank 的梯度都到齐了。"],
      ["scaler.step", "The optimizer step: all eight images are in it, however many ranks have read them.", "优化器更新：无论由几个 rank 读取，八张图像都在其中。"],
      ["loss * weight).backward", "There is nobody to average with: the gradients of both micro-batches add up in this rank.", "没有别的 rank 可以求平均，两个 micro-batch 的梯度在本 rank 上累加。"],
      ["votes.count", "The votes of all ranks are counted: nobody wishes to stop.", "统计所有 rank 的投票：没有 rank 要求停止。"],
      ["checkpoints.save", "A checkpoint is due after each second step (--checkpoint-every 2) and at the end of an epoch. A thread writes it.", "每两步（--checkpoint-every 2）以及 epoch 结束时保存检查点，由一个线程写盘。"],
      ["@killed", "The process of rank 1 and its torchrun are killed. Rank 0 does not know it yet.", "rank 1 的进程和它的 torchrun 被杀死。rank 0 还不知道。"],
      ["@failed", "The kernel has closed the connection of the killed process, so the call fails at once. After a loss of power nobody closes it, and rank 0 would wait until --timeout. The process ends; its torchrun lives.", "内核关闭了被杀进程的连接，调用立刻失败。如果是断电，没有谁来关闭连接，rank 0 要等到 --timeout。进程退出，但它的 torchrun 还在。"],
      ["@return", "Step 4 is done. Go back and compare step 3, by two ranks and by one: the same eight images, and the same weights after it, to the digits shown.", "第 4 步完成。往回比较两个 rank 做的第 3 步和一个 rank 做的第 3 步：八张图像相同，之后的权重在显示的位数上也相同。"]
    ]
  }
};

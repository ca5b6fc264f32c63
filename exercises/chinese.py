"""What the exercises say to their readers, in Chinese: the texts of english.py."""

from exercises.english import Text

TEXTS = {
    1: Text(
        title="分配图像",
        task="""\
两个进程分工，用 256 张图像训练一个 epoch。

这两个进程称为 rank 0 和 rank 1，运行的是同一个程序。在一个 epoch 中，每张图像应该
只由其中一个 rank 读取一次。现象：损失在下降，但一个 epoch 有 8 个训练步，与单进程一样多。""",
        hint="""\
DataLoader 读哪些图像，由谁决定？在这个程序里，没有人告诉它有两个 rank。""",
        page=("data-loading.md", "哪个进程得到哪些图像"),
        why="""\
DataLoader 不知道还有别的进程：设置 shuffle=True 时，每个 rank 都会读取整个数据集。
DistributedSampler 给每个 rank 分一份，而且所有 rank 用同一个随机顺序。""",
    ),
    2: Text(
        title="图像的顺序",
        task="""\
用 256 张图像训练三个 epoch，每个 epoch 的图像顺序应该各不相同。

不报错。现象：每个 epoch 开头的五张图像都一样；每个 rank 在各个 epoch 中读取的，
总是它已经读过的那些图像。""",
        hint="""\
DistributedSampler 根据随机种子和 epoch 的编号打乱顺序。谁来数 epoch？""",
        page=("data-loading.md", "为什么要 set_epoch"),
        why="""\
DistributedSampler 用随机种子加 epoch 的编号来打乱顺序，这样所有 rank 的顺序才一致。
它自己不会数 epoch，要用 sampler.set_epoch(epoch) 告诉它。""",
    ),
    3: Text(
        title="DDP 里的模型",
        task="""\
用 DistributedDataParallel（DDP）在两个 rank 上训练同一个模型。

每个训练步之后，各 rank 的权重应该相同。

不报错，损失也在下降。现象：各 rank 打印的第一个权重不同。""",
        hint="""\
DDP 在自己的前向传播中，为梯度求平均做准备。程序调用 DDP 的前向传播了吗？""",
        page=("03_mnmc_ddp_launch.md", "包装模型"),
        why="""\
程序调用的是 model 本身，没有经过包在外面的 DDP。这样 DDP 就不会对梯度求平均，
每个 rank 各训各的模型。训练用 ddp，评估和保存用 model。""",
    ),
    4: Text(
        title="GPU 的编号",
        task="""\
给每个进程选一块 GPU，同一台机器上的进程不能共用。

有两台机器，每台两块 GPU。torchrun 启动四个进程：rank 0 和 1 在第一台机器上，
rank 2 和 3 在第二台机器上。做这个练习不需要 GPU：程序只写出设备的名字。在真实的 GPU 上，
rank 2 和 3 会失败，报错 "invalid device ordinal"。""",
        hint="""\
在每台机器上，GPU 都从 0 开始编号。进程的哪个编号也是这样数的？""",
        page=("concepts.md", "什么是 rank、local rank、node rank 和 world size？"),
        why="""\
rank 在所有机器上统一编号，GPU 则在每台机器上单独编号。torchrun 会设置 LOCAL_RANK，
也就是进程在本机的编号。""",
    ),
    5: Text(
        title="统计正确数",
        task="""\
在 100 张图像上评估模型，每个 rank 评估一半。

rank 0 应该打印两个 rank 合计的正确数。

现象：什么也没有打印，程序也一直不结束。""",
        hint="""\
所有 rank 都调用了，集合通信操作才会完成。哪些 rank 调用了 all_reduce？""",
        page=("concepts.md", "集合通信"),
        why="""\
只有 rank 0 调用了 all_reduce。它在那里等 rank 1，而 rank 1 在 barrier 里等它。
集合通信操作要放在 `if rank == 0` 外面，里面只放打印和保存。""",
    ),
    6: Text(
        title="评估 101 张图像",
        task="""\
在 101 张图像上评估模型，每个 rank 评估约一半，每张图像只应计入一次。

现象：程序统计了 102 个预测结果。""",
        hint="""\
101 不能被 2 整除。DistributedSampler 怎样处理多出来的一张？""",
        page=("data-loading.md", "精确的评估"),
        why="""\
DistributedSampler 让各份一样多：重复一些图像；设置 drop_last=True 时，则舍弃一些。
训练要求各份一样多，评估不要求：让 rank 0 取第 0、2、4……张，rank 1 取第 1、3、5……张。""",
    ),
    7: Text(
        title="平均损失",
        task="""\
在 100 张图像上评估模型：rank 0 评估 70 张，rank 1 评估 30 张。

打印这 100 张图像的平均损失。

不报错。现象：打印了一个数，但不是这 100 张图像的平均损失。""",
        hint="""\
每张图像在结果中的比重都一样吗？各个 batch 的大小不同，各个 rank 的图像数也不同。""",
        page=("data-loading.md", "精确的评估"),
        why="""\
各部分一样大时，才能对平均值再求平均。这里，最后一个 batch 比较小，rank 1 的那一份也比较小。
把所有 batch、所有 rank 的损失和图像数分别相加，最后只除一次。""",
    ),
    8: Text(
        title="全局 batch size",
        task="""\
不论用几个进程训练，每个训练步都用 96 张图像，学习率都是 0.5。

单进程训练时，一个 epoch 有 8 步。现象：两个进程时只有 4 步，每步 192 张图像。
check.py 会分别用两个和三个进程启动程序。""",
        hint="""\
DataLoader 的 batch_size 是一个进程的图像数。全局 batch 为 96 张图像时，
batch_size 和学习率各应是多少？""",
        page=("concepts.md", "batch size 是每块 GPU 的吗？学习率要缩放吗？"),
        why="""\
DataLoader 的 batch size 是每个进程的，所以全局 batch size 成了 96 乘以进程数。
全局 batch size 不变，学习率也不变。""",
    ),
    9: Text(
        title="随机翻转",
        task="""\
随机翻转每张图像。

各 rank 的翻转应该互相独立；再运行一次，翻转应该与第一次相同。

不报错。现象：两个 rank 打印的前几个翻转一模一样。""",
        hint="""\
随机数由随机种子决定。所有 rank 的模型一开始必须相同，翻转呢？""",
        page=("data-loading.md", "随机增强"),
        why="""\
所有 rank 的随机种子相同，抽到的随机数也就相同。构建模型和数据之后，
再设置一个包含 rank 的随机种子。各 rank 的模型要用同样的随机数，数据增强要用不同的。""",
    ),
    10: Text(
        title="评估时的 BN",
        task="""\
训练一个带 BN（批归一化）的模型，再在 256 张图像上评估，每个 rank 评估一半。

两个 rank 评估的应该是同一个模型。

不报错。现象：各 rank 打印的 running mean（滑动均值）不同。""",
        hint="""\
梯度会求平均。但 BN 还有滑动均值和方差，来自各 rank 自己的图像。""",
        page=("syncbn.md", "滑动统计量和评估"),
        why="""\
DDP 在每次前向传播之前，把 rank 0 的滑动均值和方差复制到所有 rank。
所以最后一个训练步之后，各 rank 的值又不同了。评估之前，再复制一次。""",
    ),
    11: Text(
        title="只写一个检查点文件",
        task="""\
只保存一次权重，只写一个文件，让不用 DDP 的程序在每个 rank 上都能加载。

现象：加载失败，因为缺少一些 key。改好以后，再看看是谁在写文件。""",
        hint="""\
先打印 ddp.state_dict() 的 key。再想一想：由哪个 rank 写？其他 rank 怎么知道已经写完？""",
        page=("03_mnmc_ddp_launch.md", "保存和退出"),
        why="""\
DDP 对象的 state_dict 的 key 以 "module." 开头：要保存里面的 model。由一个 rank 写；
多个 rank 写同一个文件，文件可能损坏。有了 barrier，其他 rank 只会读到完整的文件。""",
    ),
    12: Text(
        title="batch 数不同",
        task="""\
训练一个 epoch。

rank 0 读取 90 张图像，rank 1 读取另外 60 张，每个 batch 16 张。程序应该能结束；
可以舍弃一些图像。

现象：两个 rank 都打印了四行，rank 0 本该打印六行，程序一直不结束。""",
        hint="""\
每个训练步，各 rank 都要对梯度求平均。每个 rank 训练多少步？""",
        page=("data-loading.md", "图像不能均分时"),
        why="""\
rank 0 有六个 batch，rank 1 有四个。到了第五步，rank 0 等待 rank 1 的梯度，
而 rank 1 已经退出循环。所有 rank 的训练步数必须相同：先约定步数，取各 rank 的最小值。""",
    ),
    13: Text(
        title="梯度累积",
        task="""\
每个训练步累积四个 batch 的梯度。

每个训练步，各 rank 应该只交换一次梯度。

结果是对的。check.py 查出的问题：每个训练步有四条消息。""",
        hint="""\
四次反向传播中，只有最后一次需要另一个 rank。
对于其余几次，DDP 提供了一个上下文管理器（context manager）。""",
        page=("performance.md", "怎样让训练步更快"),
        why="""\
DDP 在每次反向传播中都对梯度求平均。通常的改法：除最后一个 batch 外，前向和反向传播都放在
`with ddp.no_sync():` 里，DDP 只累加梯度。把损失加起来只做一次反向传播，也只发送一次，
但要保存所有 batch 的激活值。""",
    ),
    14: Text(
        title="梯度裁剪",
        task="""\
自己写代码对梯度求平均，把梯度的范数裁剪到 0.6，再训练。

两个 rank 训练的结果，应该与单进程用这两份图像训练的结果相同。

不报错。现象：各 rank 打印的范数不同。""",
        hint="""\
单进程裁剪的是整个 batch 的梯度。一个 rank 什么时候才知道这个梯度？""",
        page=("concepts.md", "梯度是求和还是求平均？"),
        why="""\
每个 rank 先裁剪自己那份图像的梯度，然后才对裁剪后的梯度求平均。先裁剪再求平均，
与先求平均再裁剪，结果不同。应该先求平均，再裁剪。""",
    ),
    15: Text(
        title="dropout",
        task="""\
用 dropout 训练两个 epoch。

各个 rank、各个 epoch 丢弃的激活值都应该不同；再运行一次，丢弃的应该与第一次相同。

不报错。check.py 查出的问题：在每个训练步，所有 rank 丢弃的激活值都相同。""",
        hint="""\
随机种子由 epoch 得出，这样重启之后可以再次设置。还缺什么？""",
        page=("data-loading.md", "随机增强"),
        why="""\
torch.manual_seed(epoch) 让所有 rank 的随机种子相同。由 epoch 和 rank 得出的随机种子，
同样可以再次设置，只要任意两组 epoch 和 rank 得出的数都不同：
用 1000 * epoch + rank，不要用 epoch + rank。""",
    ),
    16: Text(
        title="从 epoch 中途恢复",
        task="""\
训练一个 epoch，共 8 步。

作业在第 3 步之后被杀死，再从检查点继续。在这个 epoch 中，每张图像应该恰好用于一个训练步。

不报错。check.py 查出的问题：有些图像用了两次，有些从未用到。""",
        hint="""\
重启之后，model 和 step 来自检查点。DataLoader 从哪里开始读？""",
        page=(
            "elastic.md",
            "谁来保存，检查点里有什么，失败后会发生什么？",
        ),
        why="""\
重启之后，训练又从这个 epoch 的第一张图像开始。epoch 中的位置也是状态的一部分：
已经训练了多少步，就跳过多少个 batch。""",
    ),
    17: Text(
        title="收到信号后停止",
        task="""\
集群向其中一个进程发送信号时，让训练正常停止。

所有 rank 应该在同一步之后停止，而且在收到信号后尽快停止。check.py 会运行三次：
向 rank 1 发送信号，向 rank 0 发送信号，以及不发送信号。

现象：rank 1 在第 5 步之后停止，rank 0 没有停，程序一直不结束。""",
        hint="""\
只有一个 rank 知道有信号。怎样在任何 rank 退出循环之前，让所有 rank 都知道？""",
        page=("elastic.md", "所有 rank 如何停在同一个训练步"),
        why="""\
一个 rank 独自退出循环，另一个就一直等它的梯度。各 rank 必须一起决定：
用 MAX 做一次 all_reduce，就知道有没有 rank 收到信号。代价是每步多一条很小的消息。""",
    ),
    18: Text(
        title="损坏的图像",
        task="""\
用一批图像训练，其中有一张已经损坏。

各 rank 不能一直互相等待：要么全部结束，而且至少有一个 rank 报错说明原因；
要么全部继续训练，而且权重相同。

现象：rank 1 跳过一个 batch，rank 0 没有跳过，程序一直不结束。""",
        hint="""\
出现异常时，跳过的代码里有集合通信操作。谁在这个操作里等待？""",
        page=("hangs.md", "七种卡住"),
        why="""\
一个 rank 跳过了一个训练步，另一个没有跳过。所以直到最后，前者的集合通信操作总是少一次。
让程序因错误而结束：torchrun 会停止其他 rank。或者让所有 rank 都跳过这一步。""",
    ),
    19: Text(
        title="手写 DDP 1：对梯度求平均",
        task="""\
用最简单的方法，实现 DistributedDataParallel 的功能。

所有 rank 都应该从 rank 0 的权重开始；反向传播之后，每个梯度都应该是所有 rank 的平均值。
这样，权重应该与 torch 的 DDP 逐位相同。

不报错。check.py 查出的问题：各 rank 的初始权重不同，而且各训各的模型。""",
        hint="""\
torch.distributed 有一个集合通信操作，把张量从一个 rank 复制到所有 rank；
还有一个，把张量在所有 rank 上求和。两者都就地修改张量。""",
        page=("concepts.md", "梯度是求和还是求平均？"),
        why="""\
开始时，每个参数做一次 broadcast；每个训练步，每个梯度做一次 all_reduce。
如果 torch 给出关于 autograd 的警告，就广播 parameter.data，而不是参数本身。""",
    ),
    20: Text(
        title="手写 DDP 2：与反向传播同时进行",
        task="""\
每个梯度一就绪就发送，同时反向传播继续计算后面的梯度。

每个参数的 hook（register_post_accumulate_grad_hook）应该启动一次不等待的
all_reduce（async_op=True）。
finish_gradients() 应该等待所有 all_reduce 完成。权重应该与 torch 的 DDP 相同。

不报错。check.py 查出的问题：各 rank 的初始权重相同，但各训各的模型。""",
        hint="""\
parameter.register_post_accumulate_grad_hook(function) 在参数的梯度就绪时调用 function(parameter)。
dist.all_reduce(..., async_op=True) 返回一个 work，调用 wait() 等它完成。""",
        page=("concepts.md", "DDP 如何用反向传播掩盖 all-reduce"),
        why="""\
hook 启动这个梯度的 all_reduce，并保存返回的 work。优化器使用梯度之前，
finish_gradients() 等待所有 work 完成。""",
    ),
    21: Text(
        title="手写 DDP 3：使用 bucket",
        task="""\
把梯度打包成约 40 kB 的 bucket（梯度桶），在反向传播期间发送。

每条消息都有固定的开销，所以大量的小消息很慢。模型有 16 个参数张量，
每个训练步应该有三到四条消息。权重应该与 torch 的 DDP 相同。

不报错。check.py 查出的问题：各 rank 的初始权重相同，但各训各的模型。""",
        hint="""\
反向传播时，最后几层的梯度最先就绪：从后往前装 bucket。一个 bucket 的梯度全部就绪后，
用 torch.cat 拼成一个张量发送，之后再把各部分复制回去。""",
        page=("concepts.md", "DDP 如何用反向传播掩盖 all-reduce"),
        why="""\
参数从后往前装入 bucket。hook 数出自己的 bucket 里有几个梯度已经就绪；最后一个就绪时，
hook 把整个 bucket 展平成一个张量发送。finish_gradients() 把结果复制回去。""",
    ),
    22: Text(
        title="分片的优化器：ZeRO 阶段 1",
        task="""\
切分优化器状态：每个 rank 只保存约一半权重的动量。

每个 rank 应该用 torch 的 SGD 只更新自己的参数，再从更新了其余参数的 rank 得到其余参数。
权重应该与普通的带动量的 SGD 逐位相同。梯度照常由 DDP 求平均。

结果是对的。check.py 查出的问题：每个 rank 都保存了全部动量。""",
        hint="""\
只把这个 rank 的参数交给 torch 的 SGD，例如前一半。SGD 更新之后，
每个参数由更新它的 rank 广播。""",
        page=("concepts.md", "哪些东西可以切分"),
        why="""\
每个 rank 的 SGD 只有约一半的参数，所以也只有一半的动量。更新之后，
每个参数由更新它的 rank 广播。隔一个取一个参数是不行的：
那样一个 rank 得到所有矩阵，另一个得到所有偏置（bias）。""",
    ),
}
